#!/usr/bin/env bash
# Heads for words on states of fewer and fewer bits. Usage: transform.sh WORKSPACE MODEL TRAIN DEV, an
# encoder and files in the form of CoNLL-U. An interrupted run goes on by the same command.
set -euo pipefail
space=$1 model=$2 train=$3 dev=$4
heads="last-layer learned-pooling adapter-64-shared"
if [ ! -f "$space/bertvision.yaml" ]; then
  bertvision finetune --model "$model" --task tagging --train "$train" --dev "$dev" \
    --skip-shared --train-questions 2500 --lr 1e-4 --workspace "$space"
else
  bertvision finetune --resume --workspace "$space"
fi
for encoding in float32 int4 transform:0.115 transform:0.3 transform:0.5; do
  own="$space-${encoding//[:.]/-}"
  if [ ! -d "$own" ]; then # the same encoder, with a store of its own
    mkdir "$own.part"
    cp -r "$space"/{bertvision.yaml,snapshots,bert} "$own.part"
    mv "$own.part" "$own"
  fi
  bertvision extract --checkpoint 1e --encoding "$encoding" --workspace "$own"
  bertvision sweep $heads --trained-on 1e --checkpoint 1e --seeds 3 --workspace "$own"
done
