#!/usr/bin/env bash
# From a dense model to experts: trains a small model of bytes, copies its MLPs into experts, and continues with a gate
# that begins dense and ends as Megatron's top-k router. For the same number of steps it also trains the experts with
# top-k routing from the start, and the dense model. The last lines are the losses on held-out text.
#
#   scripts/recipes/upcycle_dts.sh
#   OUT=runs/experts DENSE_STEPS=1000 STEPS=1000 ANNEAL=400 EXPERTS=16 scripts/recipes/upcycle_dts.sh
#
# A second call skips finished trainings.
set -euo pipefail
cd "$(dirname "$0")/../.."

BYTESCALE=${BYTESCALE:-.venv/bin/bytescale} # console command
PYTHON=${PYTHON:-.venv/bin/python}          # starts the ranks
OUT=${OUT:-runs/upcycle}                    # folder for data, checkpoints and logs
DENSE_STEPS=${DENSE_STEPS:-120}             # steps of the dense model
STEPS=${STEPS:-120}                         # steps of each training that continues from it
ANNEAL=${ANNEAL:-60}                        # steps until the gate is the top-k router
EXPERTS=${EXPERTS:-8}
RANKS=${RANKS:-2}         # ranks that share the experts
TOKENS=${TOKENS:-4000000} # tokens of the corpus, from the Python files of this environment
SEED=${SEED:-1234}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
# shellcheck source=/dev/null
source scripts/checks.sh upcycle_dts.sh
for name in DENSE_STEPS STEPS ANNEAL EXPERTS RANKS TOKENS; do whole_number "$name"; done
mkdir -p "$OUT"

[ -e "$OUT/data.idx" ] || "$BYTESCALE" corpus --output "$OUT/data" --tokens "$TOKENS"

COMMON=(
  --num-layers 2 --hidden-size 96 --ffn-hidden-size 256 --num-attention-heads 4 --group-query-attention
  --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
  --vocab-size 257 --seq-length 512 --max-position-embeddings 512 --data-path "$OUT/data" --split "96,4,0"
  --hybrid-data-parallel --hdp-tokens-per-rank 2048 --global-batch-size 8 --lr-warmup-iters 10 --clip-grad 1.0
  --weight-decay 0.01 --log-interval 10 --eval-iters 8 --eval-interval 1000000 --save-interval 1000000
  --no-load-optim --no-load-rng --seed "$SEED" --no-one-logger --cpu
)
MOE=(
  --num-experts "$EXPERTS" --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2
  --expert-model-parallel-size "$RANKS"
)
train() { # train NAME FLAGS
  local name=$1
  shift
  [ -e "$OUT/$name/latest_checkpointed_iteration.txt" ] && return
  echo "training $name ($OUT/$name.log)"
  new_log "$OUT/$name.log"
  "$PYTHON" -P -m megatron.bytescale.launch --nproc-per-node "$RANKS" pretrain_gpt_hdp.py "${COMMON[@]}" \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --save "$OUT/$name" "$@" > "$OUT/$name.log" 2>&1
}
train dense --train-iters "$DENSE_STEPS"
ON=(--load "$OUT/dense" --train-iters "$STEPS")
train gate "${ON[@]}" "${MOE[@]}" --moe-use-upcycling --moe-dts-steps "$ANNEAL" \
  --moe-dts-noise --moe-dts-temperature 2 0.1 --moe-dts-threshold 0.01
train topk "${ON[@]}" "${MOE[@]}" --moe-use-upcycling
# The dense model restarts its steps and its documents, as the other trainings do, so some documents may come again.
train dense-on --pretrained-checkpoint "$OUT/dense" --load "$OUT/dense-on" --train-iters "$STEPS"

grep -h 'experts per token' "$OUT/gate.log" || true
for name in dense gate topk dense-on; do
  printf '%-9s %s\n' "$name" "$(grep -h 'validation loss at' "$OUT/$name.log" | tail -n 1 | sed 's/ *|* *$//')"
done
