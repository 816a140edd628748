#!/usr/bin/env bash
# Trains a GPT on this machine with hybrid data parallelism, on its GPUs or, without GPUs, on CPU ranks.
#
#   make setup                                          # once
#   .venv/bin/bytescale corpus --output data/python     # once: real text to train on
#   scripts/train_local.sh                              # trains with the values below
#   LAYERS=2 HIDDEN=128 FFN=352 HEADS=4 KV_HEADS=2 ITERS=50 scripts/train_local.sh --lr 1e-3
#
# Arguments go to pretrain_gpt_hdp.py after the flags of this script and override them. DRY_RUN=1 only prints the
# command. A run continues from the last checkpoint in $OUT; on SIGTERM it saves and ends.
# Exit code: 0 also after a save on SIGTERM, 2 if arguments or data are refused, else torchrun's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$root/.venv/bin
# shellcheck source=/dev/null
source "$root/scripts/checks.sh" train_local.sh
[[ -x $bin/python ]] || fail "there is no $bin/python; run 'make setup' first"

# The devices. GPUS defaults to the number of GPUs that torch sees; GPUS=0 trains on CPU.
GPUS=${GPUS:-$("$bin/python" -P -c 'import torch; print(torch.cuda.device_count())')}
whole_number GPUS 0
RANKS=${RANKS:-$((GPUS > 0 ? GPUS : 4))}
whole_number RANKS
# The model.
LAYERS=${LAYERS:-12}
HIDDEN=${HIDDEN:-768}
FFN=${FFN:-2048}
HEADS=${HEADS:-12}
KV_HEADS=${KV_HEADS:-4}
# The data: a path without .bin and .idx, the flags of the tokenizer that wrote it, and the longest sample.
DATA=${DATA:-$root/data/python}
TOKENIZER=${TOKENIZER:---tokenizer-type NullTokenizer --vocab-size 257}
SEQ_LENGTH=${SEQ_LENGTH:-32768}
whole_number SEQ_LENGTH
# C, the most tokens of a micro-batch on one rank: 8192, or more if the longest sample needs it.
smallest=$(((SEQ_LENGTH + RANKS - 1) / RANKS))
TOKENS_PER_RANK=${TOKENS_PER_RANK:-$((smallest > 8192 ? smallest : 8192))}
# The run. BATCH counts documents and is a multiple of the data-parallel ranks.
BATCH=${BATCH:-$((16 * RANKS))}
ITERS=${ITERS:-1000}
OUT=${OUT:-$root/runs/local}
# Restarts of the ranks from the last checkpoint after a rank has died.
MAX_RESTARTS=${MAX_RESTARTS:-0}
for name in LAYERS HIDDEN FFN HEADS KV_HEADS TOKENS_PER_RANK BATCH ITERS; do whole_number "$name"; done
whole_number MAX_RESTARTS 0

if ((GPUS > 0 && RANKS > GPUS)); then
  fail "RANKS=$RANKS, but there are $GPUS GPUs; lower RANKS, or set GPUS=0 to train on CPU"
fi
read -r -a tokenizer <<<"$TOKENIZER"
device=(--bf16)
((GPUS > 0)) || device=(--cpu)

command=(
  "$bin/python" -P -m megatron.bytescale.launch --standalone --nproc-per-node="$RANKS" --shutdown-timeout=120
  --max-restarts="$MAX_RESTARTS"
  "$root/pretrain_gpt_hdp.py"
  --hybrid-data-parallel --hdp-tokens-per-rank "$TOKENS_PER_RANK" --hdp-log-dir "$OUT"
  --num-layers "$LAYERS" --hidden-size "$HIDDEN" --ffn-hidden-size "$FFN"
  --num-attention-heads "$HEADS" --group-query-attention --num-query-groups "$KV_HEADS"
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --position-embedding-type rope --rotary-base 500000 --attention-dropout 0 --hidden-dropout 0
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
  --data-path "$DATA" --split "99,1,0" "${tokenizer[@]}"
  --global-batch-size "$BATCH" --train-iters "$ITERS"
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --eval-interval 500 --eval-iters 2 --log-interval 1 --log-throughput --tensorboard-dir "$OUT/tensorboard"
  --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 500 --exit-signal-handler
  "${device[@]}" "$@"
)
if [[ ${DRY_RUN:-0} != 0 ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi

if ((GPUS > 0)); then
  present=$("$bin/python" -P -c 'import torch; print(torch.cuda.device_count())')
  ((GPUS <= present)) || fail "GPUS=$GPUS, but torch sees $present; lower GPUS, or set GPUS=0 to train on CPU"
fi
check_data "$@"
check_out

# Micro-batches differ in size; expandable segments leave less memory unused between blocks.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# The watchdog of NCCL writes the last calls of each rank to these files (docs/guide/faults.md).
mkdir -p "$OUT/nccl"
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-20000}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$OUT/nccl/rank_}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # with more threads than cores, ranks wait for each other
log=$OUT/train-$(date +%Y%m%d-%H%M%S).log
new_log "$log"
mkfifo "$log.pipe"
(trap '' TERM INT HUP && exec tee "$log" <"$log.pipe") & # ends when the last writer closes the pipe
copy=$!
"${command[@]}" >"$log.pipe" 2>&1 &
torchrun=$!
# torchrun passes SIGTERM on to the ranks, which save and end. Ctrl-C reaches torchrun directly.
trap 'kill -TERM "$torchrun"' TERM
trap : INT
status=0
wait "$torchrun" || status=$?
while kill -0 "$torchrun" 2>/dev/null; do # a trap ended the wait while torchrun still runs
  status=0
  wait "$torchrun" || status=$?
done
wait "$copy"
rm "$log.pipe"
# The error is printed again, because torchrun prints more after it.
if ((status)) && grep -m 1 '^pretrain_gpt_hdp.py: error: ' "$log" >&2; then
  status=2
fi
exit "$status"
