"""Cards: the README.md of a repository, made of what is recorded and of nothing else.

May import the records of a workspace and what lies below; nothing here asks the hub.
"""
