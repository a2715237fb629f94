"""What is learned: heads on hidden states, as plain torch modules.

Nothing here knows a disk, a store or Lightning.
"""
