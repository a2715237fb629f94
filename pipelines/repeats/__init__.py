"""Many seeds: one workspace for each in a folder, their mean and spread, methods beside each other.

May import `finetuning`, `results` and what lies below.
"""
