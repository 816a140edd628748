#!/usr/bin/env bash
# Llama-3.1 8B on documents of up to 128K tokens: 16 GPUs of 80 GB, tensor parallelism 2, each document on 1 to 8
# HDP ranks.
# Sizes: config.json of meta-llama/Llama-3.1-8B; report: arXiv 2407.21783.
export VOCAB=128256 PARAMETERS=8030261248
export NODES=2 GPUS_PER_NODE=8 SEQ_LENGTH=131072 TOKENS_PER_RANK=16384 BATCH=64 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --norm-epsilon 1e-5
  --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 2 --sequence-parallel --activation-policy auto --device-memory-gb 80
  --host-memory-gb 100 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
