"""What is learned: heads on hidden states, as plain torch modules."""
