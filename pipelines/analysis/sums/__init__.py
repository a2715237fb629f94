"""Sums over tokens that analyses are made of, block by block: moments, products of kernels.

Nothing here knows a result, a workspace or a report.
"""
