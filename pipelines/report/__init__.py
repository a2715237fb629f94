"""The report: what a workspace's results say, as one page and as tables."""
