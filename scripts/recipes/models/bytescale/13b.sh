#!/usr/bin/env bash
# ByteScale's 13B on 2,048 GPUs. Published for 7B to 30B on GitHub's lengths: 6.2 to 7.9 times static context
# parallelism. Heads, groups and widths are from ByteScale (arXiv 2502.21231); it gives no MLPs, so they are
# LLaMA's. Steps of 32M tokens, documents of up to 2M tokens.
export VOCAB=32000 PARAMETERS=11338142720
export NODES=256 GPUS_PER_NODE=8 SEQ_LENGTH=2097152 TOKENS_PER_RANK=8192 BATCH=1024 SAMPLER=byted
export MODEL_FLAGS="
  --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --group-query-attention
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --norm-epsilon 1e-5
  --rotary-base 500000 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --hdp-global-tokens 33554432 --tensor-model-parallel-size 4 --sequence-parallel --activation-policy memo
  --host-memory-gb 200 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
