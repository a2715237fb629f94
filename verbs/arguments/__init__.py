"""What verbs are given: read, joined to options, and checked before anything heavy is imported."""
