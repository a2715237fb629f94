#!/usr/bin/env bash
# Convolutional heads on a tenth of the examples, in docs/results.md. Usage: convolutions.sh WORKSPACE:
# the one that patterns/run.sh fine-tuned on squad_v1. Half an hour of a core, most of it Inception. An
# interrupted run goes on where it was by the same command.
set -euo pipefail
space=$1
bertvision sweep cnn-1xn learned-pooling-cnn-1xn learned-pooling-adapter-386-cnn-1xn \
  learned-pooling-adapter-386-cnn-nxn learned-pooling-adapter-386-inception \
  adapter-64-shared-skip last-layer --fractions 0.1 --trained-on 1e --checkpoint 1e --workspace "$space"
