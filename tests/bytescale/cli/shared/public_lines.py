"""Launch lines of public repositories, shrunk: the flags of the original, with sizes that a CPU trains in seconds.

Each line names its origin: a file of NVIDIA/Megatron-LM, a recipe of NVIDIA-NeMo/Megatron-Bridge as flags, or a
well-known model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class PublicLine:
    """A launch line and the changes that `bytescale doctor --launch` makes to it.

    Attributes:
        origin: file or model.
        words: processes, and the flags of the training.
        changes: "+" added, "-" removed, "=" replaced flags, beyond ``USUAL``; "?" decisions of the user, with the flag
            or, for a reason of the checks, without.
    """

    origin: str
    words: str
    changes: str

    @property
    def processes(self) -> int:
        """Number of processes."""
        return int(self.words.split()[0])

    @property
    def flags(self) -> str:
        """Flags of the training."""
        return self.words.split(maxsplit=1)[1]


USUAL: Final = (
    "--hybrid-data-parallel",
    "--hdp-tokens-per-rank",
    "--hdp-global-tokens",
    "--micro-batch-size",
    "--eval-interval",
    "--attention-dropout",
)
SIZES = "--hidden-size 32 --num-attention-heads 4"
GPT = f"{SIZES} --seq-length 64 --max-position-embeddings 64"
PLAIN_LLAMA = (
    f"{GPT} --position-embedding-type rope --swiglu --normalization "
    "RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0"
)
LLAMA = f"{PLAIN_LLAMA} --group-query-attention --num-query-groups 2"
CI = (
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr-decay-iters 320 --lr 0.00015 --min-lr 1e-5 "
    "--lr-decay-style cosine --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --timing-log-level 0 "
    "--log-params-norm --log-num-zeros-in-grad --eval-interval 1000 --transformer-impl transformer_engine "
    "--no-gradient-accumulation-fusion --attention-softmax-in-fp32 --use-mcore-models --ckpt-format torch_dist "
    "--dist-ckpt-strictness log_all --bf16"
)
STEPS = "--train-iters 4 --lr 1e-4 --lr-decay-style cosine --min-lr 1e-5 --weight-decay 0.1 --clip-grad 1.0 --bf16"
SAMPLED = "--train-samples 32 --lr-decay-samples 30 --lr-warmup-samples 4 --lr 1e-4 --min-lr 1e-5 --clip-grad 1.0"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm"
)
SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-pre-softmax --moe-router-dtype fp32"
)
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 250 --tiktoken-pattern v2"
FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
DDP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
    "--calculate-per-token-loss --init-model-with-meta-device --ckpt-format fsdp_dtensor --use-nccl-ub "
    "--fsdp-double-buffer"
)
BASE = "--micro-batch-size 1 --global-batch-size 8"

LINES: Final[dict[str, PublicLine]] = {
    # the twelve lines of well-known models
    "gpt3-175b": PublicLine(
        "examples/gpt3/train_gpt3_175b_distributed.sh",
        f"4 --num-layers 4 {GPT} --attention-backend auto {BASE} --step-batch-size-schedule '0:4 512:8' {STEPS} "
        "--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --lr-warmup-fraction .001 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "? --step-batch-size-schedule, ?",
    ),
    "gpt3-345m": PublicLine(
        "GPT-2 and GPT-3 of 345M parameters, as most tutorials train it",
        f"2 --num-layers 4 {GPT} --micro-batch-size 4 --global-batch-size 16 --lr 0.00015 --train-iters 4 "
        "--lr-decay-iters 320 --lr-decay-style cosine --min-lr 1e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 "
        "--clip-grad 1.0 --fp16",
        "",
    ),
    "llama2-7b": PublicLine(
        "Llama 2 7B",
        f"4 --num-layers 2 {LLAMA} {BASE} {STEPS} --tensor-model-parallel-size 2 --sequence-parallel "
        f"{DDP} --make-vocab-size-divisible-by 1 --norm-epsilon 1e-5 --use-flash-attn",
        "",
    ),
    "llama3-8b-fp8": PublicLine(
        "examples/llama/train_llama3_8b_h100_fp8.sh",
        f"2 --use-mcore-models --num-layers 2 {LLAMA} --kv-channels 8 --rotary-base 1000000 --rotary-percent 1.0 "
        f"--attention-backend fused --apply-layernorm-1p {BASE} {SAMPLED} --decoupled-lr 5e-4 --decoupled-min-lr 4e-5 "
        f"--bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc {DDP} {FP8} "
        f"--context-parallel-size 1 --sequence-parallel {MOCK}",
        "- --context-parallel-size, ? --train-samples, - --attention-backend, ? --mock-data, ? --fp8-recipe, "
        "- --tiktoken-pattern",
    ),
    "mixtral-8x7b": PublicLine(
        "examples/mixtral/train_mixtral_8x7b_distributed.sh",
        f"4 --use-mcore-models --num-layers 4 {LLAMA} --no-masked-softmax-fusion --no-position-embedding {EXPERTS} "
        f"--moe-grouped-gemm --moe-token-dispatcher-type alltoall {BASE} {STEPS} {DDP} "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel --no-load-optim",
        "",
    ),
    "deepseek-v2-lite": PublicLine(
        "DeepSeek-V2-Lite, as examples/post_training/modelopt/conf/deepseek-ai",
        f"2 --num-layers 3 {PLAIN_LLAMA} {LATENT} {EXPERTS} --moe-layer-freq [0]*1+[1]*2 --moe-ffn-hidden-size 16 "
        f"--moe-shared-expert-intermediate-size 32 --moe-grouped-gemm {BASE} {STEPS} --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --rope-type yarn --rotary-scaling-factor 40 --mscale 0.707 "
        "--mscale-all-dim 0.707",
        "",
    ),
    "deepseek-v3-proxy": PublicLine(
        "tests/functional_tests/test_cases/mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release",
        f"4 --num-layers 4 {PLAIN_LLAMA} {LATENT} --q-lora-rank 16 {EXPERTS} {SIGMOID} --moe-layer-freq [0]*1+[1]*3 "
        "--moe-token-dispatcher-type flex --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-permute-fusion "
        f"--moe-grouped-gemm --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 {BASE} {SAMPLED} --bf16 {DDP} "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttmL "
        "--recompute-granularity selective --recompute-modules moe_act mlp",
        "? --train-samples",
    ),
    "qwen2.5-7b": PublicLine(
        "examples/post_training/modelopt/conf/Qwen/Qwen2.5-7B-Instruct.sh",
        f"2 --num-layers 2 {LLAMA} --add-qkv-bias {BASE} {STEPS} --use-distributed-optimizer --norm-epsilon 1e-6 "
        "--rotary-base 1000000 --tensor-model-parallel-size 1 --context-parallel-size 2 --cp-comm-type p2p",
        "- --context-parallel-size",
    ),
    "qwen3-30b-a3b": PublicLine(
        "examples/post_training/modelopt/conf/Qwen/Qwen3-30B-A3B.sh",
        f"2 --num-layers 2 {LLAMA} --qk-layernorm --kv-channels 16 {EXPERTS} --moe-ffn-hidden-size 16 "
        f"--moe-grouped-gemm --moe-router-dtype fp32 {BASE} {STEPS} --expert-model-parallel-size 2 {DDP}",
        "+ --moe-token-dispatcher-type",
    ),
    "nemotron": PublicLine(
        "Nemotron: tests/functional_tests/test_cases/gpt/gpt3_15b_8t_release",
        f"4 --num-layers 4 {GPT} --squared-relu --position-embedding-type rope --rotary-percent 0.5 "
        "--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0.0 "
        f"--hidden-dropout 0.0 {BASE} --rampup-batch-size 4 4 16 {SAMPLED} --bf16 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --overlap-p2p-communication --use-distributed-optimizer",
        "- --overlap-p2p-communication, ? --train-samples",
    ),
    "ci-checkpoint-args": PublicLine(
        "tests/functional_tests: lines with the model in the checkpoint",
        f"2 --use-checkpoint-args {BASE} {STEPS} --seq-length 64 --max-position-embeddings 64",
        "? --use-checkpoint-args",
    ),
    "sft-fsdp2": PublicLine(
        "examples/post_training/modelopt/finetune.sh with FSDP2",
        f"2 --sft --num-layers 2 {LLAMA} {BASE} {STEPS} --use-torch-fsdp2 --no-gradient-accumulation-fusion "
        "--tokenizer-type SFTTokenizer --tokenizer-model none",
        "- --use-torch-fsdp2, + --use-distributed-optimizer, ?",
    ),
    # Megatron-LM's other examples
    "gpt-oss-20b": PublicLine(
        "examples/gptoss/02_train.sh",
        f"2 --num-layers 4 {GPT} --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm "
        "--no-masked-softmax-fusion --transformer-impl transformer_engine --group-query-attention --num-query-groups 2 "
        "--position-embedding-type rope --rope-type rope --no-bias-gelu-fusion --export-force-local-attention "
        "--quick-geglu --glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2 --window-size 15,0 "
        f"--activation-func-clamp-value 7.0 --enable-gpt-oss {EXPERTS} --moe-grouped-gemm --moe-z-loss-coeff 1e-3 "
        f"--moe-token-dispatcher-type alltoall --moe-permute-fusion {DDP} {BASE} {SAMPLED} --bf16 --use-flash-attn "
        f"--recompute-activations --pipeline-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel {FP8} "
        "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --accumulate-allreduce-grads-in-fp32",
        "- --export-force-local-attention, - --enable-gpt-oss, - --context-parallel-size, ? --train-samples, "
        "? --fp8-recipe, - --rope-type",
    ),
    "llama3-fsdp-fp8": PublicLine(
        "examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh",
        f"2 --num-layers 2 {LLAMA} --attention-backend fused --apply-layernorm-1p {BASE} {SAMPLED} --bf16 {DDP} {FSDP} "
        f"--fsdp-manual-registration {MOCK} --no-check-for-nan-in-loss-and-grad",
        "? --train-samples, - --use-megatron-fsdp, - --attention-backend, ? --mock-data, "
        "- --init-model-with-meta-device, = --ckpt-format, - --fsdp-double-buffer, - --fsdp-manual-registration, "
        "- --tiktoken-pattern",
    ),
    "deepseek-v3-fsdp": PublicLine(
        "examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh",
        f"2 --num-layers 3 {PLAIN_LLAMA} {LATENT} --q-lora-rank 16 {EXPERTS} {SIGMOID} --moe-layer-freq [0]*1+[1]*2 "
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-grouped-gemm "
        "--moe-router-force-load-balancing --moe-permute-fusion --mtp-num-layers 1 --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {BASE} {SAMPLED} --bf16 {DDP} {FSDP} --megatron-fsdp-grad-comm-dtype bf16 "
        "--megatron-fsdp-main-grads-dtype bf16 --recompute-granularity selective --recompute-modules mlp moe layernorm "
        "--lr-warmup-init 3.9e-7 --enable-experimental",
        "? --train-samples, - --use-megatron-fsdp, "
        "- --init-model-with-meta-device, = --ckpt-format, - --fsdp-double-buffer, - --megatron-fsdp-main-grads-dtype, "
        "- --megatron-fsdp-grad-comm-dtype",
    ),
    "sc21": PublicLine(
        "examples/academic_paper_scripts/sc21/SBATCH.sh",
        f"4 --num-layers 4 {GPT} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {BASE} "
        "--train-iters 4 --lr-decay-iters 320 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 "
        "--fp16 --DDP-impl local --timing-log-level 2 --eval-iters -1",
        "- --DDP-impl",
    ),
    "mamba": PublicLine(
        "examples/mamba/train.sh, with pretrain_gpt.py",
        f"2 --num-layers 2 {GPT} --hybrid-layer-pattern M*-M --spec megatron.core.models.hybrid spec "
        f"--mamba-num-heads 4 --squared-relu {BASE} {STEPS}",
        "? --spec, ? --hybrid-layer-pattern",
    ),
    # Megatron-LM's functional tests
    "ci-tp2-pp2": PublicLine(
        "gpt/gpt3_mcore_te_tp2_pp2",
        f"4 --num-layers 4 {GPT} {CI} --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --attention-backend unfused",
        "- --attention-backend",
    ),
    "ci-tp2-pp2-cp2": PublicLine(
        "gpt/gpt3_mcore_te_tp2_pp2_cp2_calculate_per_token_loss_dp_last",
        f"8 --num-layers 4 {GPT} {CI} "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
        "--sequence-parallel --calculate-per-token-loss --expert-tensor-parallel-size 4 --hidden-dropout 0.0 "
        "--attention-dropout 0.0 --attention-backend flash --use-tp-pp-dp-mapping",
        "- --context-parallel-size, - --attention-backend, - --expert-tensor-parallel-size",
    ),
    "ci-vp1-overlap": PublicLine(
        "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather",
        f"4 --num-layers 4 {GPT} {CI} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {DDP}",
        "",
    ),
    "ci-overlap-optimizer": PublicLine(
        "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_overlap_optimizer",
        f"4 --num-layers 4 {GPT} {CI} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {DDP} "
        "--overlap-param-gather-with-optimizer-step",
        "- --overlap-param-gather-with-optimizer-step",
    ),
    "ci-uneven": PublicLine(
        "gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline",
        f"2 --num-layers 5 {GPT} {CI} --pipeline-model-parallel-size 2 "
        "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3",
        "",
    ),
    "ci-fim": PublicLine(
        "gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset",
        f"2 --num-layers 2 {GPT} {CI} --fim-data --fim-rate 0.5 "
        "--fim-spm-rate 0.5 --fim-prefix-token p --fim-middle-token m --fim-suffix-token s --fim-pad-token d "
        "--fim-eod-token e --use-distributed-optimizer",
        "? --fim-data",
    ),
    "ci-full-recompute": PublicLine(
        "gpt/gpt3_mcore_te_tp1_pp1_uniform_full_recompute",
        f"2 --num-layers 2 {GPT} {CI} --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        "",
    ),
    "ci-rope-swiglu": PublicLine(
        "gpt/gpt3_mcore_te_tp1_pp2_rope_embeddings_interleaved_no_fusion",
        f"2 --num-layers 2 {GPT} {CI} --swiglu "
        "--pipeline-model-parallel-size 2 --position-embedding-type rope --rotary-interleaved --no-rope-fusion",
        "",
    ),
    "ci-mla": PublicLine(
        "gpt/gpt3_mcore_te_tp2_pp2_mla",
        f"4 --num-layers 4 {GPT} {CI} {LATENT} --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --position-embedding-type rope --attention-backend unfused",
        "- --attention-backend",
    ),
    "ci-fsdp2": PublicLine(
        "gpt/gpt3_mcore_te_tp2_pp1_fsdp2_resume_torch_dist",
        f"4 --num-layers 2 {GPT} {CI} "
        "--tensor-model-parallel-size 2 --use-torch-fsdp2",
        "- --use-torch-fsdp2, + --use-distributed-optimizer",
    ),
    "ci-zero3": PublicLine(
        "gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor",
        f"4 --num-layers 2 {GPT} {CI.replace('torch_dist', '')}"
        .replace("--ckpt-format ", "--ckpt-format fsdp_dtensor") + " --tensor-model-parallel-size 2 "
        "--use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --megatron-fsdp-main-grads-dtype fp32 "
        "--attention-dropout "
        "0.0 --hidden-dropout 0.0 --use-distributed-optimizer",
        "- --use-megatron-fsdp, = --ckpt-format, - --megatron-fsdp-main-grads-dtype",
    ),
    "ci-instances": PublicLine(
        "gpt/gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances",
        f"4 --num-layers 2 {GPT} {CI} "
        "--num-distributed-optimizer-instances 2 --use-distributed-optimizer",
        "? --num-distributed-optimizer-instances",
    ),
    "ci-grouped": PublicLine(
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM",
        f"4 --num-layers 2 {GPT} {CI} --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2 "
        f"--num-experts 4 --moe-grouped-gemm --disable-bias-linear --moe-router-load-balancing-type sinkhorn "
        f"--moe-router-topk 1 --attention-backend unfused {DDP}",
        "+ --moe-token-dispatcher-type, ? --moe-router-load-balancing-type, - --attention-backend",
    ),
    "ci-allgather": PublicLine(
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_top2router",
        f"4 --num-layers 2 {GPT} {CI} "
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --num-experts 4 "
        "--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear",
        "+ --moe-token-dispatcher-type",
    ),
    "ci-cuda-graph": PublicLine(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph",
        f"4 --num-layers 2 {LLAMA} {CI} "
        f"{EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --cuda-graph-impl transformer_engine "
        "--cuda-graph-modules attn --cuda-graph-warmup-steps 0 --moe-token-dispatcher-type alltoall",
        "- --cuda-graph-impl, - --cuda-graph-modules, - --cuda-graph-warmup-steps",
    ),
    "ci-muon": PublicLine(
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_muon",
        f"2 --num-layers 2 {LLAMA} {CI} {EXPERTS} "
        "--expert-model-parallel-size 2 --optimizer muon --muon-momentum 0.9 --moe-token-dispatcher-type alltoall",
        "",
    ),
    "ci-offloading": PublicLine(
        "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading",
        f"2 --num-layers 2 {LLAMA} {CI} {EXPERTS} "
        "--fine-grained-activation-offloading --offload-modules expert_fc1 moe_act --moe-token-dispatcher-type "
        "alltoall "
        "--expert-model-parallel-size 2 --cross-entropy-loss-fusion",
        "? --fine-grained-activation-offloading",
    ),
    # recipes of Megatron-Bridge, as flags
    "bridge-llama3-70b": PublicLine(
        "Megatron-Bridge: recipes/llama/h100/llama3.py",
        f"4 --num-layers 4 {LLAMA} {BASE} {STEPS} "
        f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel {DDP} "
        "--num-layers-per-virtual-pipeline-stage 1 --tp-comm-overlap --cross-entropy-loss-fusion --adam-eps 1e-5",
        "- --tp-comm-overlap",
    ),
    "bridge-glm-air": PublicLine(
        "Megatron-Bridge: recipes/glm/h100/glm45.py",
        f"2 --num-layers 3 {LLAMA} --add-qkv-bias --rotary-percent 0.5 "
        f"{EXPERTS} {SIGMOID} --moe-layer-freq [0]*1+[1]*2 --moe-shared-expert-intermediate-size 16 --mtp-num-layers 1 "
        f"{BASE} {STEPS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--moe-shared-expert-overlap",
        "",
    ),
}  # fmt: skip
