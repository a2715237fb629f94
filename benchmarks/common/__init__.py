"""What the scripts share: synthetic data, encoders, heads, turns and the report."""
