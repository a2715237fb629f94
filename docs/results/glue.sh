#!/usr/bin/env bash
# What stands in docs/results-glue.md, from nothing. Usage: glue.sh TASK MODEL DATA [EXAMPLES]: mrpc,
# stsb, cola or sst2, the folders of the encoder (sentence-transformers/all-mpnet-base-v2) and of the
# task's files of GLUE, and of cola and sst2 4000, the examples for training. An interrupted run goes
# on where it was by the same command.
set -euo pipefail
task=$1 model=$2 data=$3 part=${4:+--train-questions $4}
heads="cls-last-state cls-learned-pooling cls-average-pooling-adapter-386-skip
  cls-learned-pooling-adapter-386-skip"
bertvision finetune --task $task --model "$model" --data "$data" --epochs 3 --save-at 0,0.1,0.3,1,3 \
  --lr 3e-5 --batch-size 16 --warmup 0.1 --decay linear --gradient-clip 1 --precision bf16 \
  $part --workspace glue_$task
cd glue_$task
bertvision extract --checkpoint 0.3e,1e,3e
bertvision sweep $heads --trained-on 0.3e,1e,3e --checkpoint 0.3e,1e,3e --seeds 3 --epochs 10 \
  --best-epoch --batch-size 64
