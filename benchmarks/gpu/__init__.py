"""What storing hidden states takes and saves on a device of its own."""
