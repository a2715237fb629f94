"""What attention heads look at, and which of them an encoder needs.

These run the encoder: attention maps are never stored, only what is summed over them.
"""
