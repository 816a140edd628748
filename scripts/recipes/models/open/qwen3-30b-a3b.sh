#!/usr/bin/env bash
# Qwen3-30B-A3B: 128 experts, 8 for each token, balanced over whole steps (Qwen3, arXiv 2505.09388, section 2), on
# documents of up to 32K tokens: 32 GPUs of 80 GB, 8 of which share the experts of each layer.
# Sizes and the weight of the balancing loss: config.json of Qwen/Qwen3-30B-A3B.
export VOCAB=151936 PARAMETERS=30532122624
export NODES=4 GPUS_PER_NODE=8 SEQ_LENGTH=32768 TOKENS_PER_RANK=8192 BATCH=128 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention
  --num-query-groups 4 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --kv-channels 128 --qk-layernorm
  --norm-epsilon 1e-6 --rotary-base 1000000 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
  --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --recompute-granularity full
  --recompute-method uniform --recompute-num-layers 1 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
