#!/usr/bin/env bash
# The table of compressed encoders in docs/results-variants.md. Usage: compression.sh MODEL DATA: the
# folder of sentence-transformers/all-MiniLM-L6-v2 and that of GLUE's MRPC. `latency` times what
# answers: nothing else should run beside it. An interrupted run goes on by the same command.
set -euo pipefail
model=$1 data=$2 space=compression_mrpc
settings="--task mrpc --model $model --data $data --epochs 3 --save-at 3 --lr 5e-5 --batch-size 16
  --warmup 0.1 --decay linear --gradient-clip 1 --precision bf16"
lower="cls-learned-pooling@l0-3"
bertvision finetune $settings --workspace $space
bertvision logits --checkpoint 3e --workspace $space
bertvision extract --checkpoint 3e --workspace $space
bertvision sweep cls-learned-pooling $lower cls-learned-pooling@d3e $lower@d3e --checkpoint 3e \
  --epochs 10 --best-epoch --workspace $space
for kept in 3 4 5; do
  bertvision finetune $settings --variant keep:$kept --workspace $space-$kept
  bertvision finetune $settings --variant keep:$kept --distil $space:3e --workspace $space-$kept-distilled
done
bertvision finetune $settings --variant exits-by-depth:all --workspace $space-exits
bertvision extract --checkpoint 3e --split dev,tune --workspace $space-exits
bertvision exits 3e --workspace $space-exits
bertvision prune 3e --workspace $space
bertvision quantise --checkpoint 3e --workspace $space
bertvision latency cls-learned-pooling $lower --trained-on 3e --checkpoint 3e --quantised --windows 64 \
  --beside "$(printf "$space-%s:3e," 3 4 5 3-distilled 4-distilled 5-distilled | sed 's/,$//')" \
  --workspace $space
target=$(dirname "$(realpath "$0")")/compression_mrpc/tables
mkdir -p "$target"
bertvision table compression --json --workspace $space \
  $(printf -- "--with $space-%s " 3 4 5 3-distilled 4-distilled 5-distilled exits) \
  > "$target/compression.json"
