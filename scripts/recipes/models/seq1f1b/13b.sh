#!/usr/bin/env bash
# Seq1F1B's 13B on 32 GPUs. Published peak of a GPU at 64K tokens: 51.6 GB; 1F1B: 66.8 GB. Seq1F1B (arXiv
# 2406.03488) splits each micro-batch of one length into 4 slices, without recomputation.
export VOCAB=50257 PARAMETERS=13100216320
export NODES=4 GPUS_PER_NODE=8 SEQ_LENGTH=65536 TOKENS_PER_RANK=65536 BATCH=16 SAMPLER=equal
export MODEL_FLAGS="
  --num-layers 40 --hidden-size 5120 --ffn-hidden-size 20480 --num-attention-heads 40
  --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --seq1f1b-slices 4
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
