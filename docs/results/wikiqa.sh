#!/usr/bin/env bash
# Ranking with an encoder of the domain, in docs/results-sentences.md. Usage: wikiqa.sh MODEL DATA: the
# folder of sentence-transformers/all-mpnet-base-v2 and that of WikiQA. An interrupted run goes on where
# it was by the same command.
set -euo pipefail
model=$1 data=$2 space=all-mpnet-base-v2-wikiqa
bertvision finetune --task wikiqa_pairs --model "$model" --data "$data" --epochs 1 \
  --train-questions 8000 --save-at 0,1 --lr 3e-5 --batch-size 16 --warmup 0.1 --decay linear \
  --gradient-clip 1 --precision bf16 --workspace $space
bertvision rank wikiqa --data "$data" --checkpoint 0e,1e --seeds 3 --workspace $space \
  --scorers cross-encoder,cosine,bilinear,logistic,mlp
