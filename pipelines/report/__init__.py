"""The report: what a workspace's results say, as one page and as tables.

May import every other room of `pipelines`.
"""
