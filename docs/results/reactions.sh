#!/usr/bin/env bash
# The analyses of docs/results-layers.md that need an MLM head. Usage: reactions.sh MODEL REACTIONS: the folder
# of rxnfp's pretrained BERT (PyPI, rxnfp 0.1.0, models/transformers/bert_pretrained), its weights saved as
# safetensors beside a fast tokenizer, WordLevel over its vocab.txt, that splits by the expression of
# docs/reactions.py; and a CSV file with the column smiles, there notebooks/drfp-schneider-errors.csv of
# github.com/reymond-group/drfp. An interrupted run goes on where it was by the same command.
set -euo pipefail
model=$1 source=$2 space=rxnfp-reactions
docs=$(dirname "$(dirname "$(realpath "$0")")")
python "$docs/reactions.py" "$source" reactions
for part in asked learned; do
  bertvision extract --model "$model" --task text --data reactions/reactions_$part.jsonl --workspace $space
done
bertvision lens 0e --split reactions_asked-all --workspace $space
bertvision lens 0e --split reactions_asked-all --trained --train-split reactions_learned-all \
  --steps 300 --workspace $space
bertvision cloze 0e --items reactions/products.jsonl --workspace $space
bertvision cloze untrained --items reactions/products.jsonl --workspace $space
python "$docs/collect_results.py" $space
