#!/usr/bin/env bash
# MEMO's 7B with 1M tokens on 8 GPUs of 80 GB. Published: 52.30 % MFU. MEMO (arXiv 2407.12117) swaps a share of
# the activations to host memory: here 240 GB per GPU.
export VOCAB=50257 PARAMETERS=6855868416
export NODES=1 GPUS_PER_NODE=8 SEQ_LENGTH=1048576 TOKENS_PER_RANK=1048576 BATCH=2 SAMPLER=equal
export MODEL_FLAGS="
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32
  --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 8 --sequence-parallel --activation-policy memo --host-memory-gb 240
  --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
