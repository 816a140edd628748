#!/usr/bin/env bash
# ByteScale's mixture of 8 experts (8x22B) on 12,288 GPUs. Published for models in pipelines on GitHub's lengths:
# 3.4 to 4.3 times static context parallelism. Heads, groups and widths are from ByteScale
# (arXiv 2502.21231); it gives no MLPs, so they are LLaMA's. Steps of 32M tokens, documents of up to 2M tokens.
export VOCAB=32000 PARAMETERS=140620634112
export NODES=1536 GPUS_PER_NODE=8 SEQ_LENGTH=2097152 TOKENS_PER_RANK=8192 BATCH=1536 SAMPLER=byted
export MODEL_FLAGS="
  --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 --group-query-attention
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --norm-epsilon 1e-5
  --rotary-base 500000 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16384
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --hdp-global-tokens 33554432 --tensor-model-parallel-size 8 --sequence-parallel
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4
  --moe-token-dispatcher-type alltoall --recompute-granularity full --recompute-method uniform
  --recompute-num-layers 1 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
