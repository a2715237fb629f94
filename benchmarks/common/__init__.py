"""Shared parts of the scripts: synthetic data, encoders, heads, turns and the report."""
