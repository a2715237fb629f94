"""Hidden states that others wrote, into the store; and splits of it, into files that others read.

It stands on the feature store alone: no encoder runs here.
"""
