"""Tasks: data to features, labels and metric."""
