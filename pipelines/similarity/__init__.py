"""Similarity of sentences from pooled hidden states, as SentEval measures it.

May import `results`, `extraction` and what lies below.
"""
