"""Jobs: a function for each command, with its name, arguments and defaults.

A job is declared once (see `declare`): the command is made from its signature and its docstring. It
reads its arguments as the command line would (``"0.3e,1e"`` and ``["0.3e", "1e"]`` are the same),
checks every name before anything heavy is imported, calls one pipeline, and returns typed results.
"""
