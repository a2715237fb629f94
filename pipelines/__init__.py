"""Pipelines: data, encoders, extraction, training, results and analyses.

Each folder is a room; a room imports only what lies below it (a contract in ``pyproject.toml`` says
so). The modules beside the rooms are the ground that all of them stand on, but for `quickstart`,
the roof, and `measurements`, which stands on the workspace.
"""
