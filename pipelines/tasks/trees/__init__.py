"""Treebanks in CoNLL-U: words with their parts of speech, heads and relations; parsing them."""
