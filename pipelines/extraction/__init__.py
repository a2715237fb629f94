"""Extraction: a snapshot's hidden states into the activation store, and pooled states out of it.

May import `workspace` and what lies below it; it knows no training.
"""
