"""Copies of splits whose tokens were permuted, so that one pass over them is a global shuffle.

It stands on what writes any split (`creation`, `writing`) and moves codes as they are.
"""
