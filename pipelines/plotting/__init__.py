"""Figures as matplotlib axes, for papers: what is drawn, and how.

Results say what their figures hold in two forms, series with intervals and heat maps; matplotlib is
imported when something is drawn. May import errors alone.
"""
