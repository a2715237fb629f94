#!/usr/bin/env bash
# Methods of docs/variants.md on few examples of a task, five seeds each, and heads on the encoder as it
# was pretrained. Usage: variants.sh TASK MODEL DATA: mrpc, stsb or cola, the folder of the encoder
# (sentence-transformers/all-MiniLM-L6-v2) and of the task's files of GLUE. An interrupted run goes on
# where it was by the same command. On mrpc exits-by-depth:all-2e-4 and the frozen layers were left
# out; only the runs on stsb had a core to themselves, so that they alone have seconds. cola is not
# learned from 1,000 sentences: it has 4,000, twice the rate, and the methods that were published for
# few examples.
set -euo pipefail
task=$1 model=$2 data=$3
settings="--train-questions 1000" rate=5e-5
methods="plain longer rate:2e-4 no-bias-correction reinit:1 layer-decay:0.8 mixout:0.5 cls-norm isobn
  freeze:3 keep:4 lora:8 houlsby:32 exits-by-depth:all exits-by-depth:all-2e-4"
heads="cls-learned-pooling cls-learned-pooling-adapter-386-skip"
if [ "$task" = cola ]; then
  settings="--train-questions 4000 --max-length 48" rate=1e-4
  methods="plain no-bias-correction reinit:1 isobn exits-by-depth:all"
fi
runs() {
  bertvision repeat --seeds 5 --task "$task" --model "$model" --data "$data" \
    $settings --batch-size 16 --warmup 0.1 --decay linear \
    --gradient-clip 1 --precision bf16 --workspace "variants-$task/$1" "${@:2}"
}
for method in $methods; do
  case $method in
    plain) runs plain --epochs 3 --save-at 3 --lr $rate ;;
    rate:2e-4) runs rate-2e-4 --epochs 3 --save-at 3 --lr 2e-4 ;;
    exits*-2e-4) runs "${method/:/-}" --epochs 3 --save-at 3 --lr 2e-4 --variant "${method%-2e-4}" ;;
    longer) runs longer --epochs 9 --save-at 9 --lr $rate ;;
    lora:* | houlsby:*) runs "${method/:/-}" --epochs 3 --save-at 3 --lr 5e-4 --variant "$method" ;;
    *) runs "${method/:/-}" --epochs 3 --save-at 3 --lr $rate --variant "$method" ;;
  esac
done
collect=$(dirname "$(realpath "$0")")/../collect_spread.py
if [ "$task" = cola ]; then
  cd variants-cola
  python "$collect" cola ${methods//:/-}
  exit
fi
runs heads --epochs 3 --save-at 0 --lr $rate
for seed in 0 1 2 3 4; do
  bertvision extract --checkpoint 0e --workspace "variants-$task/heads/seed-$seed"
  bertvision sweep $heads --epochs 20 --checkpoint 0e --workspace "variants-$task/heads/seed-$seed"
done
frozen="freeze:0 freeze:1 freeze:2 freeze:3 freeze:4 freeze:5 freeze:6"
for method in $frozen; do
  runs "${method/:/-}" --epochs 3 --save-at 3 --lr $rate --variant "$method"
done
cd "variants-$task"
python "$collect" $([ "$task" = stsb ] && echo --timed) "$task" ${methods//:/-} $(for head in $heads; do echo "heads@$head:0e"; done)
python "$collect" "$task-freezing" plain ${frozen//:/-}
bertvision spread plain ${frozen//:/-} --plot "$(dirname "$collect")/results/variants/freezing.svg"
