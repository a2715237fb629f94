"""Cost and gain of storing hidden states on a device of its own."""
