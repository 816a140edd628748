#!/usr/bin/env bash
# Seq1F1B's 30B on 64 GPUs. Published peak of a GPU at 64K tokens: 67.5 GB; 1F1B runs out of 80 GB. Seq1F1B (arXiv
# 2406.03488) splits each micro-batch of one length into 4 slices, without recomputation.
export VOCAB=50257 PARAMETERS=29613711360
export NODES=8 GPUS_PER_NODE=8 SEQ_LENGTH=65536 TOKENS_PER_RANK=65536 BATCH=16 SAMPLER=equal
export MODEL_FLAGS="
  --num-layers 64 --hidden-size 6144 --ffn-hidden-size 24576 --num-attention-heads 64
  --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel --seq1f1b-slices 4
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
