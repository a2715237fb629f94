#!/usr/bin/env bash
# What stands in docs/results-sentences.md: similarity, ranking and probes with an encoder before and
# after its epoch on SQuAD. Usage: sentences.sh WORKSPACE DATA: the workspace that patterns/run.sh
# fine-tuned on squad_v1, and the folder with sts, glue, wikiqa and senteval_probing. An interrupted
# run goes on where it was by the same command.
set -euo pipefail
space=$1 data=$2
bertvision similarity sick sts12 sts14 sts16 --data "$data/sts" --checkpoint 0e,1e --workspace "$space"
bertvision similarity sts_benchmark --data "$data/glue" --checkpoint 0e,1e --workspace "$space"
bertvision rank wikiqa --data "$data/wikiqa" --checkpoint 0e,1e --seeds 3 --workspace "$space"
bertvision probe sentence_length tree_depth past_present \
  --data "$data/senteval_probing" --checkpoint 0e,1e --untrained --pool cls,mean --workspace "$space"
