"""Changes to how an encoder is fine-tuned, chosen by name: a file and a line in `registry` each.

Stands on `tasks` and `encoders`, because a snapshot is read with the variants that it was made by.
"""
