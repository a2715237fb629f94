"""Offline analyses on Dask: a store to a table.

May import `workspace` and what lies below; it runs no encoder.
"""
