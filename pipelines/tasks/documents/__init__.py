"""Documents and conversations as decoders read them: windows of tokens, nothing to be learned."""
