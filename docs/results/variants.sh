#!/usr/bin/env bash
# Methods of docs/variants.md on few examples of a task, five seeds each. Usage: variants.sh TASK MODEL
# DATA: mrpc, stsb or cola, the folder of the encoder (sentence-transformers/all-MiniLM-L6-v2) and of the
# task's files of GLUE. An interrupted run goes on where it was by the same command.
set -euo pipefail
task=$1 model=$2 data=$3
methods="plain no-bias-correction reinit:1 layer-decay:0.8 mixout:0.5 cls-norm isobn freeze:3"
for method in $methods; do
  variant="--variant $method"
  [ "$method" != plain ] || variant=
  bertvision repeat --seeds 5 --task "$task" --model "$model" --data "$data" \
    --train-questions 1000 --epochs 3 --save-at 3 --lr 5e-5 --batch-size 16 --warmup 0.1 \
    --decay linear --gradient-clip 1 --precision bf16 $variant \
    --workspace "variants-$task/${method/:/-}"
done
cd "variants-$task"
python "$(dirname "$(realpath "$0")")/../collect_spread.py" "$task" ${methods//:/-}
