"""Texts in, answers out."""
