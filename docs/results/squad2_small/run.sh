#!/usr/bin/env bash
# What docs/results.md says of 5,600 questions of SQuAD 2.0, from nothing. Usage: run.sh MODEL DATA, the
# folders of the encoder (sentence-transformers/all-mpnet-base-v2) and of the data.
set -euo pipefail
model=$1 data=$2
bertvision finetune --model "$model" --train "$data/train.json.gz" --dev "$data/dev.json.gz" \
  --train-questions 5600 --tune-fraction 0.1 --save-at 0,0.1,0.3,1 --lr 5e-5 --batch-size 8 \
  --warmup 0.1 --gradient-clip 1 --precision bf16 --workspace squad2_small
