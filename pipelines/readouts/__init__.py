"""Readouts: small models trained on stored hidden states, to see what each layer holds.

Probes, rankers, scorers of similarity, probes of trees and heads over the vocabulary: a model for
each layer, pooling, setting and seed, trained in one batched pass. May import `results`,
`extraction` and what lies below.
"""
