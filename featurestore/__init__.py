"""What is kept: the format of activation stores, writing, reading and streaming them."""
