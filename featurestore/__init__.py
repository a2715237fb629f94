"""Activation stores: written, read and streamed.

The modules here are the interface; below them lie `format` (what the bytes mean) and `storage`
(where the files lie). Nothing here knows a model or a task.
"""
