#!/usr/bin/env bash
# Trains a small model of bytes, then Clover and Medusa heads on it at the same time and for the same time, and decodes
# with both. Prints accepted guesses per forward pass by the shape of the tree.
#
#   scripts/recipes/draft_heads.sh
#   OUT=runs/drafts STEPS=3000 MINUTES=5 SEEDS="1 2 3" scripts/recipes/draft_heads.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

BYTESCALE=${BYTESCALE:-.venv/bin/bytescale} # console command
OUT=${OUT:-runs/draft-heads}                # folder for data, checkpoints and logs
STEPS=${STEPS:-1400}                        # steps of the model's training
MINUTES=${MINUTES:-3}                       # training of each kind of heads
SEEDS=${SEEDS:-1}                           # order of the documents of the heads
TEXTS=${TEXTS:-40}                          # prompts
TOKENS=${TOKENS:-96}                        # generated tokens per prompt
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
# shellcheck source=/dev/null
source scripts/checks.sh draft_heads.sh
mkdir -p "$OUT"

[ -e "$OUT/data.idx" ] || "$BYTESCALE" corpus --output "$OUT/data" --tokens 6000000

COMMON=(
  --num-layers 3 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --group-query-attention
  --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
  --vocab-size 257 --seq-length 512 --max-position-embeddings 2048 --data-path "$OUT/data" --split "98,2,0"
  --hybrid-data-parallel --hdp-tokens-per-rank 4096 --global-batch-size 2 --lr-warmup-iters 20 --clip-grad 1.0
  --weight-decay 0.01 --log-interval 50 --eval-iters 0 --eval-interval 1000000 --save-interval 1000000 --cpu
)
if [ ! -e "$OUT/model/latest_checkpointed_iteration.txt" ]; then
  echo "training the model ($OUT/model.log)"
  new_log "$OUT/model.log"
  "$BYTESCALE" train "${COMMON[@]}" --lr 3e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-decay-iters "$STEPS" \
    --train-iters "$STEPS" --save "$OUT/model" > "$OUT/model.log" 2>&1
fi
for seed in $SEEDS; do # both kinds at the same time, so other work on the machine slows both
  for kind in clover medusa; do
    heads="$OUT/$kind-$seed"
    [ -e "$heads/latest_checkpointed_iteration.txt" ] && continue
    echo "training $kind heads for $MINUTES minutes ($heads.log)"
    new_log "$heads.log"
    "$BYTESCALE" train "${COMMON[@]}" --lr 2e-3 --lr-decay-style constant --train-iters 1000000 --seed "$seed" \
      --draft-heads "$kind" --num-draft-heads 4 --pretrained-checkpoint "$OUT/model" --load "$heads" --save "$heads" \
      --exit-duration-in-mins "$MINUTES" > "$heads.log" 2>&1 &
  done
  wait
done

# Prompts: lines of Python's standard library, far apart.
no_links "$OUT/prompts"
[ -e "$OUT/prompts" ] || find "$(.venv/bin/python -P -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
  -maxdepth 1 -name '*.py' -print0 | sort -z | xargs -0 cat | grep -E '^[ -~]{30,90}$' |
  awk -v texts="$TEXTS" 'NR % 997 == 0 && found++ < texts' > "$OUT/prompts"
for seed in $SEEDS; do
  for kind in clover medusa; do
    for shape in --plain --chain "--tree-tokens 5" "--tree-tokens 10" "--tree-tokens 20" "--tree-tokens 40"; do
      [ "$kind $shape" = "medusa --plain" ] && continue # the same model
      # shellcheck disable=SC2086
      printf '%s, seed %s, %s: %s\n' "$kind" "$seed" "$shape" "$("$BYTESCALE" generate --load "$OUT/$kind-$seed" --cpu \
        --prompts "$OUT/prompts" --max-tokens "$TOKENS" --json $shape 2>&1 > /dev/null | tail -n 1)"
    done
  done
done
