"""How far groups of texts lie apart: languages, domains, authors.

Each text is one pooled vector by layer, so that a sample of texts is held in memory.
"""
