"""The audit of a split: a sample of its examples computed again, and compared with what is stored.

It runs the encoder, and learns and stores nothing.
"""
