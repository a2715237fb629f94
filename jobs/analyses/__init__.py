"""Verbs that ask what hidden states hold: probes, rankings, similarities of layers.

They may import what the other verbs do, and share nothing with each other.
"""
