"""Verbs between a workspace and the Hugging Face hub."""
