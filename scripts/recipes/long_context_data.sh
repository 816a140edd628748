#!/usr/bin/env bash
# From text to training on long contexts: cleans two sources, mixes them, makes windows of related documents, and trains
# on the windows with hybrid data parallelism. The sources are Python files and C headers, as in the demo.
#
#   scripts/recipes/long_context_data.sh
#   OUT=runs/mine CONTEXT=32K STEPS=200 PYTHON_TEXTS=src HEADER_TEXTS=include scripts/recipes/long_context_data.sh
#
# A second call continues where the first ended and skips finished stages: tasks of cleaning, the mixture, the windows
# of each data set, and the checkpoints of the training.
set -euo pipefail
cd "$(dirname "$0")/../.."

BYTESCALE=${BYTESCALE:-.venv/bin/bytescale} # console command
PYTHON=${PYTHON:-.venv/bin/python}          # starts the ranks
OUT=${OUT:-runs/long-context-data}          # folder for texts, windows, checkpoints and logs
CONTEXT=${CONTEXT:-16K}                     # tokens of a window; a token is a byte
STEPS=${STEPS:-30}                          # steps of the training
RANKS=${RANKS:-2}                           # ranks of the training
WORKERS=${WORKERS:-$(nproc)}                # parallel tasks of cleaning
purelib=$("$PYTHON" -P -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
PYTHON_TEXTS=${PYTHON_TEXTS:-$purelib/megatron}
HEADER_TEXTS=${HEADER_TEXTS:-$purelib/torch/include/torch}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
# shellcheck source=/dev/null
source scripts/checks.sh long_context_data.sh
tokens=$CONTEXT
for name in CONTEXT STEPS RANKS WORKERS tokens; do whole_number "$name"; done
mkdir -p "$OUT"
no_links "$OUT/recipe.toml" "$OUT/train.log"

# Quality filters are for prose, so these sources of code have none. Sentences are lines here: licences repeat more
# lines in a row than code does.
[ -e "$OUT/recipe.toml" ] || cat > "$OUT/recipe.toml" << RECIPE
steps = ["pii", "exact", "near", "sentences"]
sentences = 6
min_words = 40
tasks = 4

[[source]]
name = "python"
path = "$PYTHON_TEXTS"
glob = "*.py"

[[source]]
name = "headers"
path = "$HEADER_TEXTS"
glob = "*.h"
RECIPE
if [ ! -e "$OUT/clean/report.json" ]; then
  echo "1. clean: $OUT/clean/report.json"
  "$BYTESCALE" data clean --recipe "$OUT/recipe.toml" --output "$OUT/clean" --concurrent-tasks "$WORKERS" --tokenize
fi
if [ ! -e "$OUT/mixture" ]; then
  echo "2. mix: $OUT/mixture"
  "$BYTESCALE" data mix --report "$OUT/clean/report.json" --samples windows --seq-length "$tokens" --temperature 2 \
    --output "$OUT/mixture"
fi
windows=()
while read -r _ prefix; do
  name=$OUT/$(basename "$prefix")
  windows+=("$name.windows.npy")
  [ -e "$name.windows.npy" ] && continue
  echo "3. sculpt: $name.windows.npy"
  "$BYTESCALE" data sculpt --input "$prefix" --seq-length "$tokens" --output "$name" < /dev/null
done < "$OUT/mixture"
if [ "$(cat "$OUT/model/latest_checkpointed_iteration.txt" 2> /dev/null || true)" != "$STEPS" ]; then
  echo "4. train: $OUT/train.log"
  device=$("$PYTHON" -P -c 'import torch; print("--bf16" if torch.cuda.is_available() else "--cpu")')
  "$PYTHON" -P -m megatron.bytescale.launch --standalone --nproc-per-node "$RANKS" pretrain_gpt_hdp.py \
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --group-query-attention \
    --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope \
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 \
    --data-args-path "$OUT/mixture" --sculpt-windows "${windows[@]}" --split 100,0,0 \
    --seq-length "$tokens" --max-position-embeddings "$tokens" \
    --hybrid-data-parallel --hdp-tokens-per-rank $(((tokens + RANKS - 1) / RANKS)) --hdp-log-dir "$OUT" \
    --global-batch-size $((2 * RANKS)) --train-iters "$STEPS" --lr 3e-3 --lr-decay-style constant --lr-warmup-iters 1 \
    --clip-grad 1.0 --weight-decay 0.1 --use-distributed-optimizer --log-interval 1 --eval-iters 0 \
    --eval-interval 1000000 --save "$OUT/model" --load "$OUT/model" --save-interval 10 "$device" >> "$OUT/train.log" 2>&1
fi
echo "trained $STEPS steps: $(tail -n 1 "$OUT/metrics.jsonl" | grep -o '"lm loss": [0-9.]*')"
