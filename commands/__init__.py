"""Commands of the command line that stand apart from the main job."""
