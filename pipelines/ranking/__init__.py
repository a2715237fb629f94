"""Ranking of candidate passages from stored hidden states, beside BM25."""
