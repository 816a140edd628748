#!/usr/bin/env bash
# The shape of GLM-4.5-Air with the losses of its report (arXiv 2508.06471, sections 2.1 and 2.4): 128 experts, 8 for each
# token, balanced by a bias and by a small loss over single documents, one depth of multi-token prediction, and positions
# in half of each head. Documents of up to 32K tokens on 64 GPUs of 80 GB.
# Sizes: config.json of zai-org/GLM-4.5-Air.
export VOCAB=151552 PARAMETERS=106852245504
export NODES=8 GPUS_PER_NODE=8 SEQ_LENGTH=32768 TOKENS_PER_RANK=8192 BATCH=128 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --num-attention-heads 96 --group-query-attention
  --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm --norm-epsilon 1e-5
  --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights --position-embedding-type rope
  --rotary-percent 0.5 --rotary-base 1000000 --num-experts 128 --moe-layer-freq [0]+[1]*45 --moe-router-topk 8
  --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --pipeline-model-parallel-size 2 --expert-model-parallel-size 32 --moe-token-dispatcher-type alltoall
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
