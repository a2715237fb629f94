"""Structure: what of gold trees each layer holds, by structural probes and edge probing.

Reads the states of words out of stored tokens, batch by batch; the probes of all layers are trained
at once.
"""
