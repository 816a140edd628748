#!/usr/bin/env bash
# Seq1F1B's 7B on 32 GPUs. Published peak of a GPU at 128K tokens: 69.8 GB and 31,584 tokens/s with 16
# micro-batches; 1F1B runs out of 80 GB. Seq1F1B (arXiv 2406.03488) splits each micro-batch of one length into 4
# slices, without recomputation.
export VOCAB=50257 PARAMETERS=6855868416
export NODES=4 GPUS_PER_NODE=8 SEQ_LENGTH=131072 TOKENS_PER_RANK=131072 BATCH=16 SAMPLER=equal
export MODEL_FLAGS="
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32
  --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0
"
export RUN_FLAGS="
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --seq1f1b-slices 4
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
