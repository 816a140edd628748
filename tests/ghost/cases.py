"""Trainings that run on CPU ranks and on ghost GPUs.

``make test`` runs the quick ones: rings, and copies to host memory. ``make gpu-rehearsal`` runs all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.e2e.training import HDP, MODEL, TRAIN

FLOAT32_TOLERANCE = 1e-6  # sums in another order
HALF_TOLERANCE = 2e-3  # FlashAttention rounds probabilities and outputs elsewhere than the kernels of CPU ranks


@dataclass(frozen=True)
class Case:
    """A training of one or more features.

    Attributes:
        name: name of the test.
        num_ranks: ranks, one for each ghost GPU.
        flags: flags in addition to the tests' model and data.
        is_bf16: whether it trains in bf16, which FlashAttention needs; otherwise in float32.
        is_quick: whether ``make test`` runs it.
    """

    name: str
    num_ranks: int
    flags: str
    is_bf16: bool = True
    is_quick: bool = False

    @property
    def tolerance(self) -> float:
        """Relative tolerance of losses on ghost GPUs against CPU ranks."""
        return HALF_TOLERANCE if self.is_bf16 or "--fp16" in self.flags else FLOAT32_TOLERANCE

    def argv(self, corpus: Path, logs: Path) -> list[object]:
        """Return all flags of the training. Latent attention has no groups of queries."""
        precision = ["--bf16"] if self.is_bf16 else []
        data = ["--data-path", corpus, "--hdp-log-dir", logs]
        groups = MODEL.index("--group-query-attention")
        model = [*MODEL[:groups], *MODEL[groups + 3 :]] if "--multi-latent-attention" in self.flags else MODEL
        return [*model, *TRAIN, *HDP, *precision, *data, *self.flags.split()]

    def __str__(self) -> str:
        return self.name


STEPS = 3
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BUCKETS = f"{SHARDED} --ddp-bucket-size 2000"
PP2 = "--num-layers 4 --pipeline-model-parallel-size 2 --hdp-tokens-per-rank 256"
ONE = "--hdp-tokens-per-rank 256"
TWO = "--hdp-tokens-per-rank 128"
TENSORS = f"--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64 {SHARDED}"
PAGED = "--state-policy paged --state-page-mb 0.00390625 --state-host-gb 1"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2"
)
BALANCED = "--moe-layer-freq [0,1] --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
CLIP = "--qk-clip --qk-clip-threshold 0.5"
NGRAM = (
    "--num-layers 3 --ngram-layers 2,3 --ngram-orders 1,3 --ngram-heads 2 --ngram-rows 50 --ngram-dim 8 "
    "--host-tables ngram --ckpt-format torch_dist"
)

CASES = (
    Case("rings in float32", 2, f"{TWO} {BUCKETS} --hdp-attention-kernel reference", is_bf16=False),
    Case("rings, windows, sinks, loss in chunks", 2,
         f"{TWO} {BUCKETS} --window-size 20,0 --window-attn-skip-freq 2 --softmax-type learnable "
         "--chunked-cross-entropy 32", is_quick=True),
    Case("zero bubble", 2, f"{PP2} --seq1f1b-slices 2 --seq1f1b-zero-bubble"),
    Case("memo and pages", 1,
         f"{ONE} --num-layers 4 --activation-policy memo --swap-fraction 0.4 --host-memory-gb 0.02 {PAGED}",
         is_quick=True),
    Case("swapped keys", 2,
         f"{TWO} --num-layers 4 --seq1f1b-slices 3 --hdp-kept-keys 150 --hdp-swapped-keys 1000 --host-memory-gb 0.01"),
    Case("replicas of experts", 2,
         f"{TWO} {EXPERTS} --moe-layer-freq [1,1] --moe-router-load-balancing-type none --moe-expert-slots 3 "
         "--moe-placement-threshold 1.02 --no-gradient-accumulation-fusion"),
    Case("tensor parallelism", 2, f"{ONE} {TENSORS}"),
    Case("n-gram memory", 2, f"{TWO} {NGRAM}"),
    Case("four ranks", 4, f"{BUCKETS} --global-batch-size 8 --hdp-tokens-per-rank 64"),
    Case("four ranks, bytescale", 4, f"{BUCKETS} --hdp-balance bytescale --hdp-tokens-per-rank 64"),
    Case("four ranks, no balance", 4, f"{BUCKETS} --hdp-balance none --hdp-tokens-per-rank 64"),
    Case("pipelines and rings", 4, f"{PP2} {BUCKETS} --hdp-tokens-per-rank 128"),
    Case("three ranks", 3, f"--num-layers 4 {BUCKETS} --global-batch-size 9 --hdp-tokens-per-rank 96"),
    Case("slices in pipelines", 2, f"{PP2} --seq1f1b-slices 3"),
    Case("eager slices", 2, f"{PP2} --seq1f1b-slices 2 --seq1f1b-eager"),
    Case("virtual stages", 2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    Case("virtual stages, slices", 2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --seq1f1b-slices 2"),
    Case("priced activations", 1,
         f"{ONE} --num-layers 4 --activation-policy priced --swap-fraction 0.3 --recompute-fraction 0.5 "
         "--host-memory-gb 0.02"),
    Case("recomputation", 2, f"{TWO} --recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1"),
    Case("memo in pipelines", 2,
         f"{PP2} --activation-policy memo --swap-fraction 0.4 --host-memory-gb 0.02"),
    Case("gradients in host memory", 2, f"{TWO} {PAGED} --state-stage 2 --use-distributed-optimizer"),
    Case("window of layers", 2,
         f"{TWO} --num-layers 4 {PAGED} --state-stage 3 --state-window-layers 2 --use-distributed-optimizer"),
    Case("pages without locks", 2, f"{TWO} {PAGED} --state-update-steps 1"),
    Case("loss in chunks, float32 sums", 2, f"{TWO} --chunked-cross-entropy 32 "
         "--accumulate-allreduce-grads-in-fp32"),
    Case("experts", 2, f"{TWO} {EXPERTS} {BALANCED} {SHARDED}"),
    Case("experts of latents", 2, f"{TWO} {EXPERTS} {BALANCED} {SHARDED} --moe-latent-size 16"),
    Case("replicas of latents", 2,
         f"{TWO} {EXPERTS} --moe-layer-freq [1,1] --moe-router-load-balancing-type none --moe-expert-slots 3 "
         "--moe-placement-threshold 1.02 --no-gradient-accumulation-fusion --moe-latent-size 16"),
    Case("multi-token prediction", 2, f"{TWO} --mtp-num-layers 1"),
    Case("evaluation", 2, f"{TWO} {SHARDED} --split 60,20,20 --eval-interval 2 --eval-iters 1"),
    Case("clipped queries and keys", 2, f"{TWO} {SHARDED} {CLIP}"),
    Case("clipped weights of a window", 2,
         f"{TWO} {CLIP} --num-layers 4 {PAGED} --state-stage 3 --state-window-layers 2 --use-distributed-optimizer"),
    Case("float16", 2, f"{TWO} --fp16", is_bf16=False),
    Case("timeline and memory", 2, f"{TWO} --hdp-timeline-step 2 --hdp-memory-step 2"),
)  # fmt: skip
