"""What becomes of words in context: which tokens are uses of a word, and how alike these are.

Built on `sums`; only its `run` knows a workspace.
"""
