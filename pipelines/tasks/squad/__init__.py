"""Tasks on SQuAD's data: questions over contexts, cut into windows."""
