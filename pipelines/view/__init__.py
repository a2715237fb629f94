"""One page that shows the hidden states of a split: tokens, top tokens, projections, errors."""
