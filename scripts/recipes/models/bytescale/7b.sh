#!/usr/bin/env bash
# ByteScale's 7B on 1,024 GPUs. Published: a step of 8 min 40 s with static context parallelism took 4 min 32 s
# with HDP and 2 min 37 s balanced. Heads, groups and widths are from ByteScale (arXiv 2502.21231);
# it gives no MLPs, so they are LLaMA's. Steps of 32M tokens, documents of up to 2M tokens.
export VOCAB=32000 PARAMETERS=5933109248
export NODES=128 GPUS_PER_NODE=8 SEQ_LENGTH=2097152 TOKENS_PER_RANK=8192 BATCH=1024 SAMPLER=byted
export MODEL_FLAGS="
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --norm-epsilon 1e-5
  --rotary-base 500000 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --hdp-global-tokens 33554432 --tensor-model-parallel-size 2 --sequence-parallel --activation-policy memo
  --host-memory-gb 200 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
