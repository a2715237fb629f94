#!/usr/bin/env bash
# What stands in docs/results-layers.md, from nothing: an encoder fine-tuned from two seeds on a task,
# and the analyses of its layers. Usage: run.sh MODEL DATA TASK LAST, such as
# `run.sh all-mpnet-base-v2 glue/MRPC mrpc 3` or `run.sh MODEL squad squad_v1 1`. An interrupted run
# goes on where it was by the same command. The treebank is UD English EWT, of train the first 3,000
# sentences; it stands in treebank/. MiniLM had the learning rate 5e-5 on MRPC and 1e-4 on SQuAD.
set -euo pipefail
model=$1 data=$2 task=$3 last=${4}e
rate=${RATE:-$([ "$task" = mrpc ] && echo 3e-5 || echo 5e-5)}
tags=0e,0.1e,0.3e,1e
[ "$last" = 1e ] || tags=$tags,$last
for seed in 0 1; do
  space=$(basename "$model")-$task-$seed
  if [ "$task" = mrpc ]; then
    bertvision finetune --task mrpc --model "$model" --data "$data" --epochs 3 \
      --save-at 0,0.1,0.3,1,3 --lr "$rate" --batch-size 16 --warmup 0.1 --decay linear \
      --gradient-clip 1 --precision bf16 --seed $seed --workspace "$space"
  else
    bertvision finetune --model "$model" --train "$data/train-v1.1.json.gz" \
      --dev "$data/dev.json.gz" --answerable-only --train-questions 5300 --tune-fraction 0.05 \
      --save-at 0,0.1,0.3,1 --lr "$rate" --batch-size 8 --warmup 0.1 --gradient-clip 1 \
      --precision bf16 --seed $seed --workspace "$space"
  fi
  bertvision extract --checkpoint $tags --split dev --pool none --workspace "$space"
  bertvision extract --checkpoint $tags --task treebank --data treebank --split test \
    --workspace "$space"
  for tag in ${tags//,/ }; do
    [ $tag = 0e ] || bertvision rsa 0e $tag --split dev,treebank-test --workspace "$space"
  done
  bertvision cka 0e $last --workspace "$space"
  bertvision isotropy $tags --workspace "$space"
  bertvision isotropy $tags --split treebank-test --workspace "$space"
  bertvision context 0e,$last --workspace "$space"
  python docs/collect_patterns.py "$space=$space"
done

# Syntax of the pretrained encoder, measured on mrpc alone; all-mpnet-base-v2 had fewer seeds and epochs.
if [ "$task" = mrpc ]; then
  shorter=$([ "$(basename "$model")" = all-mpnet-base-v2 ] && echo "--seeds 2 --epochs 6" || true)
  bertvision extract --checkpoint 0e --task treebank --data treebank --split train,dev,test \
    --workspace "$space"
  bertvision structure 0e $shorter --workspace "$space"
  python docs/collect_patterns.py "$space=$space"
  mkdir -p "docs/results/$space/tables"
  bertvision table structure --json --workspace "$space" > "docs/results/$space/tables/structure.json"
fi
