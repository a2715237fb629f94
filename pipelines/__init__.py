"""What is done: fine-tuning, extraction, training, evaluation and analysis."""
