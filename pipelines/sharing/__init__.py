"""The Hugging Face hub: heads, snapshots, stores and reports sent there, and brought back.

May import `results`, `training` and what lies below.
"""
