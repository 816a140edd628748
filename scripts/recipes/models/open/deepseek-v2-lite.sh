#!/usr/bin/env bash
# DeepSeek-V2-Lite: multi-latent attention with YaRN; all layers except the first have 64 experts, 6 for each token, and
# 2 shared experts, balanced over single documents (its configuration: seq_aux). Documents of up to 32K tokens on 8 GPUs
# of 80 GB, which share the experts of each layer.
# Sizes and losses: config.json of deepseek-ai/DeepSeek-V2-Lite, and DeepSeek-V2 (arXiv 2405.04434, appendix B).
export VOCAB=102400 PARAMETERS=15706484224
export NODES=1 GPUS_PER_NODE=8 SEQ_LENGTH=32768 TOKENS_PER_RANK=8192 BATCH=64 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --swiglu
  --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --untie-embeddings-and-output-weights
  --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --qk-layernorm --position-embedding-type rope --rope-type yarn --rotary-base 10000 --rotary-scaling-factor 40
  --mscale 0.707 --mscale-all-dim 0.707 --num-experts 64 --moe-layer-freq [0]+[1]*26 --moe-router-topk 6
  --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 --moe-router-pre-softmax
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --recompute-granularity full
  --recompute-method uniform --recompute-num-layers 1 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
