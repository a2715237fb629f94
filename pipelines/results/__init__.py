"""Results: everything that was scored, its costs, comparisons, errors, ensembles and sweeps.

May import `finetuning`, `training` and what lies below.
"""
