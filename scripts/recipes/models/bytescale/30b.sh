#!/usr/bin/env bash
# ByteScale's 30B on 4,096 GPUs. Published for 7B to 30B on GitHub's lengths: 6.2 to 7.9 times static context
# parallelism. Heads, groups and widths are from ByteScale (arXiv 2502.21231); it gives no MLPs, so they are
# LLaMA's. Steps of 32M tokens, documents of up to 2M tokens.
export VOCAB=32000 PARAMETERS=28439497216
export NODES=512 GPUS_PER_NODE=8 SEQ_LENGTH=2097152 TOKENS_PER_RANK=8192 BATCH=1024 SAMPLER=byted
export MODEL_FLAGS="
  --num-layers 60 --hidden-size 6656 --ffn-hidden-size 17920 --num-attention-heads 56 --group-query-attention
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --norm-epsilon 1e-5
  --rotary-base 500000 --kv-channels 128 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --hdp-global-tokens 33554432 --tensor-model-parallel-size 8 --sequence-parallel --activation-policy memo
  --host-memory-gb 200 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
