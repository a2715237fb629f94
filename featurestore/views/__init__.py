"""Splits as other libraries know data: xarray's engine, Hugging Face data sets, HTML in a notebook.

Nothing of a split is copied into them: what is asked for is read, checked and decoded then.
"""
