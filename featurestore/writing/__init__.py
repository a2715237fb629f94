"""Under every writer: the content of a shard; and a writer for hidden states made by any code.

Stands on `creation`, `delegation` and `split`, below the writer of extraction.
"""
