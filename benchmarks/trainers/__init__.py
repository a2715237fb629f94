"""What trainers of sparse autoencoders and draft heads keep hidden states in."""
