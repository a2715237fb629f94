#!/usr/bin/env bash
# Parsers of English in docs/results-variants.md, three seeds each. Usage: parsing.sh MODEL TREEBANK:
# the folder of sentence-transformers/all-MiniLM-L6-v2 and that of UD English EWT, of train
# the first 3,000 sentences. An interrupted run goes on where it was by the same command.
set -euo pipefail
model=$1 data=$2
collect=$(dirname "$(realpath "$0")")/../collect_spread.py
methods="plain keep:3 freeze:6 lora:8"
for method in $methods; do
  rate=1e-4 variant="--variant $method"
  case $method in
    plain) variant= ;;
    lora:*) rate=5e-4 ;;
  esac
  bertvision repeat --seeds 3 --task parsing --model "$model" --data "$data" --train-questions 3000 \
    --epochs 5 --save-at 5 --lr $rate --batch-size 16 --warmup 0.1 --decay linear --gradient-clip 1 \
    --precision bf16 $variant --workspace "variants-parsing/${method/:/-}"
done
cd variants-parsing
python "$collect" parsing ${methods//:/-}
