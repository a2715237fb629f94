"""What jobs would do: counted from the data and from records, without weights and unwritten.

It may import what does the jobs, and everything below.
"""
