#!/usr/bin/env bash
# The shape of Gemma-3 4B: windows of 1,024 tokens in five of six layers, wide heads, tied embeddings. Not its
# weights: Megatron has no norms after attention and MLP, no scaled embeddings, one base of RoPE for all layers, and
# SwiGLU in place of GeGLU.
# Sizes: config.json of google/gemma-3-4b-pt; report: arXiv 2503.19786.
export VOCAB=262144 PARAMETERS=3879925248
export NODES=1 GPUS_PER_NODE=8 SEQ_LENGTH=131072 TOKENS_PER_RANK=16384 BATCH=32 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 34 --hidden-size 2560 --ffn-hidden-size 10240 --num-attention-heads 8 --group-query-attention
  --num-query-groups 4 --swiglu --normalization RMSNorm --disable-bias-linear --kv-channels 256
  --qk-layernorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 1000000
  --window-size 1023,0 --window-attn-skip-freq 6 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
