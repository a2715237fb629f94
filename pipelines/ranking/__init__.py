"""Ranking of candidate passages from stored hidden states, beside BM25.

May import `results`, `extraction` and what lies below.
"""
