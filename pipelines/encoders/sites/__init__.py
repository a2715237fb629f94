"""Sites: the places inside a layer of an encoder whose activations can be kept, by name.

May import what `encoders` may, and of that room `hub` alone; `names` imports nothing heavy.
"""
