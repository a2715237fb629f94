#!/usr/bin/env bash
# What stands in docs/results.md about SQuAD 2.0. Usage: run.sh ENCODER DATA: the snapshot 1e that
# squad11/run.sh made (squad11/snapshots/1e), and the folder of the data. An interrupted run goes on
# where it was by the same command. The store is made in two parts, so that 33 GB of disk are enough.
set -euo pipefail
encoder=$1 data=$2
few="last-layer learned-pooling last-layer-adapter-64 adapter-64-shared-skip adapter-386-shared-skip"
heads="last-layer average-pooling learned-pooling last-layer-adapter-64 last-layer-adapter-386
  adapter-64-shared adapter-64-shared-skip adapter-64-independent adapter-386-shared
  adapter-386-shared-skip"
bertvision finetune --model "$encoder" --train "$data/train.json.gz" --dev "$data/dev.json.gz" \
  --tune-fraction 0.05 --save-at 0,0.1,0.3,1 --lr 5e-5 --batch-size 8 --warmup 0.1 \
  --gradient-clip 1 --precision bf16 --workspace squad2
cd squad2
bertvision extract --checkpoint 0.3e
bertvision extract --checkpoint 1e --split tune,dev
bertvision sweep $few --trained-on 0.3e --checkpoint 0.3e,1e --seeds 3
bertvision store rm 0.3e/train --yes
bertvision extract --checkpoint 1e
bertvision sweep $heads --trained-on 1e --checkpoint 1e --seeds 3
