"""Tasks of sentences and pairs of sentences: GLUE, SentEval, labelled files, answer ranking."""
