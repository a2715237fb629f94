"""Training beside the encoder: splits that are computed as heads read them, and what that costs.

May import `extraction`, `training` and what lies below.
"""
