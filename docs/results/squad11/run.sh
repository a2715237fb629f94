#!/usr/bin/env bash
# What stands in docs/results.md about answerable questions, from nothing. Usage: run.sh MODEL DATA, the
# folders of the encoder (sentence-transformers/all-mpnet-base-v2) and of the data. An interrupted run
# goes on where it was by the same command.
set -euo pipefail
model=$1 data=$2
heads="last-layer average-pooling learned-pooling last-layer-adapter-64 last-layer-adapter-386
  adapter-64-shared adapter-64-shared-skip adapter-64-independent adapter-386-shared
  adapter-386-shared-skip"
bertvision finetune --model "$model" --train "$data/train-v1.1.json.gz" --dev "$data/dev.json.gz" \
  --answerable-only --train-questions 5300 --tune-fraction 0.05 --save-at 0,0.1,0.3,1 --lr 5e-5 \
  --batch-size 8 --warmup 0.1 --gradient-clip 1 --precision bf16 --workspace squad11
cd squad11
bertvision extract --checkpoint 0.3e,1e
bertvision sweep $heads --trained-on 0.3e,1e --checkpoint 0.3e,1e --seeds 3
bertvision sweep adapter-64-shared-skip last-layer --trained-on 0.3e,1e --checkpoint 0.3e,1e \
  --fractions 0.1,0.2,0.3,0.5,0.7 --seeds 3
for on in 0.3e 1e; do
  for head in adapter-64-shared-skip adapter-386-shared-skip; do
    for how in max mean; do
      for seed in "" @s1 @s2; do
        bertvision ensemble $head$seed --with-bert --combine $how --trained-on $on --checkpoint $on
      done
    done
  done
done
bertvision sweep attention-pooling learned-pooling-bilinear-64 adapter-64-independent-skip \
  adapter-386-independent adapter-386-shared-pooled-skip learned-pooling-adapter-386-skip \
  --trained-on 0.3e,1e --checkpoint 0.3e,1e
bertvision sweep cnn-1xn learned-pooling-cnn-1xn learned-pooling-adapter-386-cnn-1xn \
  learned-pooling-adapter-386-cnn-nxn --fractions 0.3 --trained-on 1e --checkpoint 1e
bertvision cka 0.3e 1e --max-tokens 8000
bertvision rsa 0.3e 1e --repeats 3
