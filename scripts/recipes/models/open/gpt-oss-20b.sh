#!/usr/bin/env bash
# gpt-oss-20b: 32 experts, 4 for each token, attention sinks, windows of 128 tokens in every other layer, YaRN, biases
# in all linear layers; documents of up to 128K tokens on 16 GPUs of 80 GB.
# Sizes: config.json of openai/gpt-oss-20b; model card: arXiv 2508.10925, which tells no balancing loss: 1e-2 is ours.
export VOCAB=201088 PARAMETERS=20914757184
export NODES=2 GPUS_PER_NODE=8 SEQ_LENGTH=131072 TOKENS_PER_RANK=16384 BATCH=64 SAMPLER=github
export MODEL_FLAGS="
  --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --group-query-attention
  --num-query-groups 8 --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0
  --normalization RMSNorm --norm-epsilon 1e-5 --untie-embeddings-and-output-weights --kv-channels 64
  --position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32
  --yarn-original-max-position-embeddings 4096 --no-yarn-correction-range-round-to-int
  --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 --num-experts 32
  --moe-router-topk 4 --moe-ffn-hidden-size 2880 --moe-router-load-balancing-type aux_loss
  --moe-aux-loss-coeff 1e-2 --attention-dropout 0 --hidden-dropout 0
"
export RUN_FLAGS="
  --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --recompute-granularity full
  --recompute-method uniform --recompute-num-layers 1 --chunked-cross-entropy 2048
"
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch_model.sh" "$@"
