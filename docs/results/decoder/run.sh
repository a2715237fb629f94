#!/usr/bin/env bash
# What stands in docs/results-decoder.md, from nothing. Usage: run.sh MODEL DATA: the folders of the
# decoder (google/gemma-3-270m) and of the data (glue, senteval_downstream, wnut17). An interrupted run
# goes on where it was by the same command.
set -euo pipefail
model=$1 data=$2 here=$(dirname "$(realpath "$0")")
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1

part() { # FILE N HEADER TARGET: every N-th line behind the header
  mkdir -p "$(dirname "$4")"
  gzip -dc "$1" | LC_ALL=C awk -v n="$2" -v h="$3" 'NR <= h || (NR - h) % n == 1 || n == 1' > "$4"
}
sentences() { # FILE N TARGET: every N-th sentence of CoNLL columns
  mkdir -p "$(dirname "$3")"
  gzip -dc "$1" | LC_ALL=C awk -v n="$2" '/^[ \t]*$/ { ended = 1; next }
    ended { i++; ended = 0; if (i % n == 0) print "" } i % n == 0' > "$3"
}
if [ ! -d parts ]; then
  part "$data/glue/SST-2/train.tsv.gz" 20 1 parts.new/SST-2/train.tsv
  part "$data/glue/SST-2/dev.tsv.gz" 1 1 parts.new/SST-2/dev.tsv
  part "$data/glue/SST-2/dev.tsv.gz" 3 1 parts.new/third/dev.tsv
  cp parts.new/SST-2/train.tsv parts.new/third
  part "$data/glue/CoLA/train.tsv.gz" 2 0 parts.new/CoLA/train.tsv
  part "$data/glue/CoLA/dev.tsv.gz" 1 0 parts.new/CoLA/dev.tsv
  part "$data/senteval_downstream/subj.all.gz" 4 0 parts.new/senteval/subj.all
  part "$data/senteval_downstream/TREC.train.all.gz" 2 0 parts.new/senteval/TREC.train.all
  part "$data/senteval_downstream/TREC.test.all.gz" 1 0 parts.new/senteval/TREC.test.all
  sentences "$data/wnut17/train.conll.gz" 8 parts.new/wnut17/train.conll
  sentences "$data/wnut17/dev.conll.gz" 8 parts.new/wnut17/dev.conll
  sentences "$data/wnut17/test.conll.gz" 4 parts.new/wnut17/test.conll
  mv parts.new parts
fi

# 1. All tokens in float32, from which every pooling in every encoding is made.
for given in sst2:SST-2 trec:senteval cola:CoLA subj:senteval; do
  bertvision extract --model "$model" --task ${given%:*} --data parts/${given#*:} --pool none \
    --encoding float32 --precision 32 --workspace decoder
done

# 2. Seconds, bytes and errors of every encoding.
for encoding in float32 bfloat16 int8 int4 transform:0.115; do
  own=encoding-${encoding//[:.]/-}
  if [ ! -s $own.json ]; then
    bertvision extract --model "$model" --task sst2 --data parts/third --split dev --pool none \
      --encoding $encoding --precision 32 --workspace $own --json > $own.new
    mv $own.new $own.json
  fi
done

# 3. Probes of sentences, three seeds each. The copies share the files of the tokens.
for encoding in float32 int8 int4; do
  own=decoder-$encoding
  [ -d $own ] || { rm -rf copy.new && cp -rl decoder copy.new && mv copy.new $own; }
  for seed in 0 1 2; do
    bertvision probe sst2 trec cola subj --pool last,mean --standardise --folds 3 --seed $seed \
      --encoding $encoding --precision 32 --workspace $own
  done
done

# 4. The lens, and the missing word.
bertvision lens 0e --split sst2-dev --max-tokens 2000 --workspace decoder
for items in agreement "$here/facts.jsonl"; do
  bertvision cloze 0e --items "$items" --workspace decoder
  bertvision cloze untrained --items "$items" --workspace decoder
done

# 5. Low-rank fine-tuning on SST-2, and what it changes, three seeds.
for seed in 0 1 2; do
  bertvision finetune --task sst2 --model "$model" --data parts/third --train-questions 2000 \
    --save-at 0,1 --variant lora:8 --lr 5e-4 --batch-size 16 --warmup 0.1 --decay linear \
    --gradient-clip 1 --precision 32 --seed $seed --workspace tuned-$seed
  for kept in "" "--keep from:1"; do
    [ $seed = 0 ] || [ -n "$kept" ] || continue # once shows what the first token does
    bertvision extract --checkpoint 0e,1e --split dev --pool none $kept --encoding float32 \
      --precision 32 --workspace tuned-$seed
    split=dev${kept:+-kept}
    bertvision cka 0e 1e --split $split --workspace tuned-$seed
    bertvision rsa 0e 1e --split $split --max-tokens 2000 --repeats 3 --workspace tuned-$seed
    bertvision isotropy 0e,1e --split $split --workspace tuned-$seed
    bertvision twonn 0e,1e --split $split --workspace tuned-$seed
  done
done

# 6. Probes of words.
for encoding in float32 int8; do
  for seed in 0 1 2; do
    bertvision probe tagging --model "$model" --data parts/wnut17 --standardise --seed $seed \
      --encoding $encoding --precision 32 --workspace words-$encoding
  done
done

python "$here/../../collect_decoder.py" .
