"""Offline analyses: a store to a table."""
