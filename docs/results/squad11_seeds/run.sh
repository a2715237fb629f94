#!/usr/bin/env bash
# What stands in docs/results.md about several fine-tunings, from nothing. Usage: run.sh MODEL DATA [SEEDS],
# the folders of the encoder (sentence-transformers/all-MiniLM-L6-v2) and of the data, and how many
# fine-tunings (3). An interrupted run goes on where it was by the same command, and more seeds add to
# what is there.
set -euo pipefail
model=$1 data=$2 seeds=${3:-3}
heads="last-layer average-pooling learned-pooling adapter-64-shared-skip"
bertvision repeat --seeds $seeds --model "$model" --train "$data/train-v1.1.json.gz" \
  --dev "$data/dev.json.gz" --answerable-only --train-questions 2000 --tune-fraction 0.05 \
  --save-at 0,0.3,0.6,1 --lr 1e-4 --batch-size 4 --warmup 0.1 --gradient-clip 1 --precision bf16 \
  --workspace squad11_seeds
cd squad11_seeds
for tag in 0.3e 1e 0e 0.6e; do
  for space in seed-*; do
    bertvision extract --checkpoint $tag --workspace $space
    bertvision sweep $heads --epochs 3 --trained-on $tag --checkpoint $tag --workspace $space
  done
done
for space in seed-*; do
  bertvision sweep $heads --epochs 3 --trained-on 0.3e --checkpoint 1e --workspace $space
  bertvision sweep last-layer@l0 --epochs 3 --trained-on 0e --checkpoint 0e --workspace $space
done
