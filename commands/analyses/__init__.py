"""The commands that ask what hidden states hold; they learn nothing that would be kept."""
