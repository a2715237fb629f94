"""Decoders that go on with prompts, and the hidden states of what they read and write, kept.

Tokens come one at a time, in batches, with the keys and values of those before in a cache.
"""
