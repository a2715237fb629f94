"""How hidden states lie in their space: whether they spread, and over how many directions.

Built on `sums`; only its `run` knows a workspace.
"""
