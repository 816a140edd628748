#!/usr/bin/env bash
# MEMO's 65B with up to 1,408K tokens on 64 GPUs of 80 GB, reported for its first version at 51.45 % MFU. MEMO
# (arXiv 2407.12117) swaps a share of the activations to host memory: here 240 GB per GPU.
export VOCAB=50257 PARAMETERS=65256456192
export NODES=8 GPUS_PER_NODE=8 SEQ_LENGTH=1441792 TOKENS_PER_RANK=180224 BATCH=8 SAMPLER=equal
export MODEL_FLAGS="
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 32768 --num-attention-heads 64
  --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 8 --sequence-parallel --activation-policy memo --host-memory-gb 240
  --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
