"""What one does, in Python: a function for each command, with its name, options and defaults.

A verb reads what it is given as the command line would (``"0.3e,1e"`` and ``["0.3e", "1e"]`` are
the same), checks every name before anything heavy is imported, calls one pipeline, and returns
typed results.
"""
