#!/usr/bin/env bash
# Llama-3.1 70B on documents of up to 128K tokens: 128 GPUs of 80 GB, tensor parallelism 8, pipelines of 4 stages
# in 4 slices.
# Sizes: config.json of meta-llama/Llama-3.1-70B; report: arXiv 2407.21783.
export VOCAB=128256 PARAMETERS=70553706496
export NODES=16 GPUS_PER_NODE=8 SEQ_LENGTH=131072 TOKENS_PER_RANK=32768 BATCH=32 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --position-embedding-type rope --norm-epsilon 1e-5
  --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --seq1f1b-slices 4
  --activation-policy memo --host-memory-gb 200 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
