"""How alike the layers of two encoders are: arrays of the same tokens → a result.

Built on `sums`; knows no workspace.
"""
