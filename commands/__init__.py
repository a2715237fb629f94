"""The command line's commands, a file for each family: parse, call one function, print a table."""
