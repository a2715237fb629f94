"""The format: what a store's bytes mean, and the records that say what is committed.

May import `storage` and nothing above.
"""
