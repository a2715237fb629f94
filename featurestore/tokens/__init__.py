"""Token streams: batches of the vectors of single tokens, for trainers of sparse autoencoders.

The order is arithmetic (`order`), whole layers of shards are read into one bounded buffer (`ring`),
and batches are rows of it (`batch`). Nothing here knows a model or a task.
"""
