"""What this machine is and can do, as it is found and measured; knows nothing of experiments."""
