"""What layers say over the vocabulary, read by a head of masked language modelling.

May import what `analysis` may, and the base of its results.
"""
