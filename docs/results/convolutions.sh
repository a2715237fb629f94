#!/usr/bin/env bash
# Convolutional heads on a tenth of the examples, in docs/results.md. Usage: convolutions.sh WORKSPACE:
# the one that patterns/run.sh fine-tuned on squad_v1. About three hours of a core, most of them Xception,
# which takes up to 14 GB of memory. An interrupted run goes on where it was by the same command.
set -euo pipefail
space=$1
bertvision sweep cnn-1xn learned-pooling-cnn-1xn learned-pooling-adapter-386-cnn-1xn \
  learned-pooling-adapter-386-cnn-nxn learned-pooling-adapter-386-inception \
  learned-pooling-adapter-386-xception adapter-64-shared-skip last-layer --fractions 0.1 \
  --trained-on 1e --checkpoint 1e --workspace "$space"
