"""Training: heads from the store, without running the encoder, and their evaluation.

May import `workspace` and what lies below it; it knows no extraction.
"""
