"""The commands ``bertvision push`` and ``pull``."""
