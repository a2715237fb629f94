#!/usr/bin/env bash
# The figures of docs/analyses.md that are of a small encoder. Usage: figures.sh MODEL DATA TREEBANK: the
# folders of sentence-transformers/all-MiniLM-L6-v2, of the data (glue/MRPC, senteval_downstream) and of
# UD English EWT. They stand in analysis/ of the workspaces. For `structure` treebank/ holds
# that treebank too, of train its first 3,000 sentences. An interrupted run goes on where it was.
set -euo pipefail
model=$1 data=$2 treebank=$3 space=all-MiniLM-L6-v2-mrpc-0
settings="--task mrpc --model $model --data $data/glue/MRPC --epochs 3 --lr 5e-5 --batch-size 16
  --warmup 0.1 --decay linear --gradient-clip 1 --precision bf16"
bertvision finetune $settings --save-at 0,0.1,0.3,1,3 --workspace $space
bertvision extract --checkpoint 0e,3e --split train,dev --pool none --workspace $space
bertvision cca 0e 3e --workspace $space
bertvision attention 3e --windows 200 --workspace $space
bertvision prune 3e --items 400 --workspace $space
bertvision relations 0e --data "$treebank" --workspace $space
bertvision lens 0e --trained --steps 150 --workspace $space
bertvision languages 0e --task mr,cr,subj,mpqa,trec --data "$data/senteval_downstream" \
  --workspace $space
bertvision extract --checkpoint 0e,untrained --task treebank --data treebank --workspace $space
bertvision structure 0e,untrained --seeds 1 --epochs 6 --workspace $space
bertvision finetune $settings --save-at 3 --variant exits-by-depth:all --workspace $space-exits
bertvision extract --checkpoint 3e --split dev --workspace $space-exits
bertvision exits 3e --workspace $space-exits
python "$(dirname "$(dirname "$(realpath "$0")")")/collect_results.py" $space
