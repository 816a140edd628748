#!/usr/bin/env bash
# Runs or prints a recipe of scripts/recipes/models/, which sets the values and calls this script:
#
#   scripts/recipes/models/open/llama-3.1-8b.sh dry-run      # plan, messages and memory of a step, without a GPU
#   scripts/recipes/models/open/llama-3.1-8b.sh print        # the lines for torchrun and for SLURM
#   HEAD_NODE=node0 RENDEZVOUS_ID=TEXT scripts/recipes/models/open/llama-3.1-8b.sh torchrun   # on each node
#   scripts/recipes/models/open/llama-3.1-8b.sh slurm --account=ACCOUNT       # options of sbatch
#   scripts/recipes/models/open/llama-3.1-8b.sh flags        # only the flags of the training
#
# RENDEZVOUS_ID is a text that other users of the cluster cannot guess, the same on each node; print makes one.
# The variables DATA, TOKENIZER (flags), OUT and ITERS work as for scripts/train_slurm.sbatch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
action=${1:-print}
shift || true
# shellcheck source=/dev/null
source "$root/scripts/checks.sh" launch_model.sh
for name in NODES GPUS_PER_NODE; do whole_number "$name" 0; done
DATA=${DATA:-data/documents}
TOKENIZER=${TOKENIZER:---tokenizer-type NullTokenizer --vocab-size $VOCAB}
ITERS=${ITERS:-1000}
OUT=${OUT:-runs/recipe}
read -r -d '' -a run <<<"$RUN_FLAGS" || true
flags=(
  --hybrid-data-parallel --hdp-tokens-per-rank "$TOKENS_PER_RANK" --seq-length "$SEQ_LENGTH"
  --max-position-embeddings "$SEQ_LENGTH" --global-batch-size "$BATCH" "${run[@]}"
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0
  --train-iters "$ITERS" --eval-iters 0 --eval-interval 1000000
)
read -r -d '' -a model <<<"$MODEL_FLAGS $TOKENIZER --data-path $DATA --split 99,1,0" || true
# torch unpickles what the members of a rendezvous write.
random=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
if [[ $action == torchrun && $NODES -gt 1 && -z ${RENDEZVOUS_ID:-} ]]; then
  fail "give RENDEZVOUS_ID, one random text for all nodes, such as $random"
fi
launch=(
  "$root/.venv/bin/python" -P -m megatron.bytescale.launch --nnodes="$NODES" --nproc-per-node="$GPUS_PER_NODE"
  --rdzv-backend=c10d --rdzv-endpoint="${HEAD_NODE:-HEAD_NODE}:29500" --rdzv-id="${RENDEZVOUS_ID:-$random}" "$root/pretrain_gpt_hdp.py"
  "${model[@]}" "${flags[@]}" --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 500
)
export MODEL_FLAGS DATA TOKENIZER ITERS OUT SEQ_LENGTH TOKENS_PER_RANK BATCH GPUS_PER_NODE
case $action in
  flags) printf '%s\n' "${model[@]}" "${flags[@]}" ;;
  print)
    printf '%q ' "${launch[@]}"
    printf '\n\n'
    for name in MODEL_FLAGS DATA TOKENIZER ITERS OUT SEQ_LENGTH TOKENS_PER_RANK BATCH GPUS_PER_NODE; do
      read -r -d '' -a words <<<"${!name}" || true
      printf '%s=%q ' "$name" "${words[*]}"
    done
    printf '%q ' sbatch --nodes="$NODES" --gpus-per-node="$GPUS_PER_NODE" "$root/scripts/train_slurm.sbatch" "${run[@]}"
    printf '\n'
    ;;
  dry-run)
    lengths=(--sampler "$SAMPLER")
    if [[ $SAMPLER == equal ]]; then # all samples have one length
      mkdir -p "$OUT"
      new_log "$OUT/lengths.npy"
      "$root/.venv/bin/python" -P -c 'import sys, numpy; numpy.save(sys.argv[1], [int(sys.argv[2])])' \
        "$OUT/lengths.npy" "$SEQ_LENGTH"
      lengths=(--lengths "$OUT/lengths.npy")
    fi
    exec "$root/.venv/bin/bytescale" dry-run --ranks $((NODES * GPUS_PER_NODE)) \
      --ranks-per-node "$GPUS_PER_NODE" "${lengths[@]}" "$@" -- "${model[@]}" "${flags[@]}"
    ;;
  torchrun) exec "${launch[@]}" "$@" ;;
  slurm)
    exec sbatch --nodes="$NODES" --gpus-per-node="$GPUS_PER_NODE" "$@" "$root/scripts/train_slurm.sbatch" "${run[@]}"
    ;;
  *) fail "$action: give dry-run, print, torchrun, slurm or flags" ;;
esac
