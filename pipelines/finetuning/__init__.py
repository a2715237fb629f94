"""Fine-tuning: snapshots of an encoder, and the encoder's own scores at each.

May import `training` (what every training shares), `workspace` and what lies below.
"""
