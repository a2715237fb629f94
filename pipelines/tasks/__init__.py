"""Tasks: data to windows, labels, losses and scores.

May import the ground alone; no other room knows what a task's data look like.
"""
