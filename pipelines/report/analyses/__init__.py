"""Sections of what hidden states say by themselves, beside the scores of heads.

May import every other room of `pipelines`, and of the report its parts; its page imports this room.
"""
