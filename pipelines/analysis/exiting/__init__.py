"""Early exit: what output layers at lower layers would save and cost, from stored states.

Stands on `training`, which runs output layers over a store, and on `results`.
"""
