"""Encoders: finding and loading them, and their forward pass from windows to hidden states.

May import `tasks` (windows and batches) and the ground.
"""
