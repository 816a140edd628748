#!/usr/bin/env bash
# Mistral-7B v0.1, windows of 4,096 tokens in all layers, on documents of up to 64K tokens: 8 GPUs of 80 GB.
# Sizes: config.json of mistralai/Mistral-7B-v0.1; report: arXiv 2310.06825.
export VOCAB=32000 PARAMETERS=7241732096
export NODES=1 GPUS_PER_NODE=8 SEQ_LENGTH=65536 TOKENS_PER_RANK=8192 BATCH=64 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --norm-epsilon 1e-5
  --rotary-base 10000 --window-size 4095,0 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
