#!/usr/bin/env bash
# Heads on states of 4 bits beside 8, and how long an answer takes. Usage: int4.sh WORKSPACE, which
# patterns/run.sh fine-tuned on squad_v1. An interrupted run goes on where it was by the same command.
set -euo pipefail
space=$1
heads="last-layer learned-pooling adapter-64-shared-skip adapter-386-shared-skip"
bertvision extract --checkpoint 1e --workspace "$space"
bertvision sweep $heads --trained-on 1e --checkpoint 1e --seeds 3 --workspace "$space"
if [ ! -d "$space-int4" ]; then # the same encoder, with a store of its own
  mkdir "$space-int4.part"
  cp -r "$space"/{bertvision.yaml,snapshots,bert} "$space-int4.part"
  mv "$space-int4.part" "$space-int4"
fi
bertvision extract --checkpoint 1e --encoding int4 --workspace "$space-int4"
bertvision sweep $heads --trained-on 1e --checkpoint 1e --seeds 3 --workspace "$space-int4"
bertvision sweep adapter-64-shared@l0-4 adapter-64-shared@l0-8 --trained-on 1e --checkpoint 1e \
  --seeds 3 --workspace "$space"
bertvision latency --checkpoint 1e --workspace "$space"
