"""Sentence ordering: paragraphs out of order, whose sentences all stand in one window."""
