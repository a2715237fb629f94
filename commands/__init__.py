"""The commands, a file for each family: what is typed, and its help; verbs do the work."""
