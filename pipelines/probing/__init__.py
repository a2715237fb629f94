"""Probes: what a linear classifier can read from frozen hidden states, layer by layer.

May import `results`, `extraction` and what lies below.
"""
