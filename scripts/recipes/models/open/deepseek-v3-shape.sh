#!/usr/bin/env bash
# The shape of DeepSeek-V3 with the losses of its report (arXiv 2412.19437, sections 2.1, 2.2 and 4.2): 256 experts, 8 for
# each token out of 4 of 8 groups, a bias in place of most of the balancing loss, which is over single documents, and one
# depth of multi-token prediction. Documents of up to 32K tokens (section 4.3) on 256 GPUs of 80 GB. Not its FP8.
# Sizes: config.json of deepseek-ai/DeepSeek-V3.
export VOCAB=129280 PARAMETERS=671026404352
export NODES=32 GPUS_PER_NODE=8 SEQ_LENGTH=32768 TOKENS_PER_RANK=4096 BATCH=512 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu
  --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --untie-embeddings-and-output-weights
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
  --v-head-dim 128 --qk-layernorm --position-embedding-type rope --rope-type yarn --rotary-base 10000
  --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --num-experts 256 --moe-layer-freq [0]*3+[1]*58
  --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-score-function sigmoid
  --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 16 --decoder-last-pipeline-num-layers 13
  --expert-model-parallel-size 64 --moe-token-dispatcher-type alltoall --recompute-granularity full
  --recompute-method uniform --recompute-num-layers 1 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
