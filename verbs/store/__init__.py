"""Verbs on what is kept: hidden states of others brought in, one's own brought out."""
