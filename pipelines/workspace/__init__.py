"""The workspace: the folder of one experiment, its settings, data sets, snapshots and runs.

May import `encoders`, `tasks` and the ground.
"""
