#!/usr/bin/env bash
# MEMO's 13B on 16 GPUs of 80 GB. MEMO (arXiv 2407.12117) swaps a share of the activations to host memory: here
# 240 GB per GPU.
export VOCAB=50257 PARAMETERS=13100216320
export NODES=2 GPUS_PER_NODE=8 SEQ_LENGTH=1048576 TOKENS_PER_RANK=524288 BATCH=2 SAMPLER=equal
export MODEL_FLAGS="
  --num-layers 40 --hidden-size 5120 --ffn-hidden-size 20480 --num-attention-heads 40
  --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 8 --sequence-parallel --activation-policy memo --host-memory-gb 240
  --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
