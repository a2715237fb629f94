"""Splits as others know data: xarray's engine, Hugging Face data sets, text, HTML in a notebook.

Nothing of a split is copied into them: what is asked for is read, checked and decoded then.
"""
