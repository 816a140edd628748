#!/usr/bin/env bash
# Seq1F1B's 2.7B on 8 GPUs. Published peak of a GPU at 32K tokens: 53.1 GB; 1F1B runs out of 80 GB. Seq1F1B (arXiv
# 2406.03488) splits each micro-batch of one length into 4 slices, without recomputation.
export VOCAB=50257 PARAMETERS=2774968320
export NODES=1 GPUS_PER_NODE=8 SEQ_LENGTH=32768 TOKENS_PER_RANK=32768 BATCH=8 SAMPLER=equal
export MODEL_FLAGS="
  --num-layers 32 --hidden-size 2560 --ffn-hidden-size 10240 --num-attention-heads 32
  --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel --seq1f1b-slices 4
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
