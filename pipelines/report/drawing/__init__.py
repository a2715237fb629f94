"""The report's figures: what is drawn of its rows.

May import `drawing` and what else the report may.
"""
