"""Each row of the table of refusals refuses its setting by name, for each feature in its column."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import pytest

from megatron.bytescale.arguments.conditions import above
from megatron.bytescale.arguments.positions import POSITION_REFUSALS
from megatron.bytescale.arguments.refusals import ALWAYS, PROGRAM, REFUSALS, Refusal, refuse, refuse_conflicts
from megatron.bytescale.features import FEATURES, loss_chunks, refusals
from megatron.bytescale.features.activations import refusals as activations
from megatron.bytescale.features.hdp import refusals as hdp
from megatron.bytescale.features.slices import refusals as slices
from tests.e2e.training import HDP, MODEL, TRAIN
from tests.harness import run_ranks

COMMON = [*MODEL, *TRAIN, "--data-path", "unread", "--cpu"]
SWITCHED_ON = {
    "hdp": HDP,
    "slices": ["--seq1f1b-slices", "4"],
    "activations": ["--activation-policy", "memo", "--host-memory-gb", "0.1"],
    "memory_plan": ["--memory-plan", "plan.json"],
    "loss_chunks": ["--chunked-cross-entropy", "8"],
    ALWAYS: [],
}
FLAGS = {name: words[0] if words else PROGRAM for name, words in SWITCHED_ON.items()}
# Flags of later versions of Megatron, which tests/survey/versions.toml tests with them.
LATER = {"--ckpt-pg-tensors-cache-path", "--enable-mhc-connections", "--mtp-hsm", "--output-logit-dtype"}
# Flags of each row of the table, as a user would give them.
EXAMPLES = {
    "--context-parallel-size > 1": "--context-parallel-size 2",
    "--microbatch-group-size-per-virtual-pipeline-stage": (
        "--microbatch-group-size-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 4"
    ),
    "--num-experts under tensor parallelism": "--num-experts 4 --tensor-model-parallel-size 2",
    "--num-experts with biases of local layers without --hybrid-data-parallel": "--num-experts 4",
    "--moe-token-dispatcher-type allgather": (
        "--moe-token-dispatcher-type allgather --num-experts 4 --expert-model-parallel-size 2"
    ),
    "--moe-flex-dispatcher-backend ncclep": (
        "--moe-flex-dispatcher-backend ncclep --moe-token-dispatcher-type flex --num-experts 4"
    ),
    "--moe-router-load-balancing-type": "--moe-router-load-balancing-type sinkhorn --num-experts 4",
    "--moe-router-load-balancing-type of slices": "--moe-router-load-balancing-type global_aux_loss --num-experts 4",
    "--moe-expert-capacity-factor": "--moe-expert-capacity-factor 1.5 --num-experts 4",
    "--moe-latent-size of Megatron's own layers without TransformerEngine": "--moe-latent-size 16 --num-experts 4",
    "--moe-apply-probs-on-input with several experts per token": "--moe-apply-probs-on-input --num-experts 4",
    "--moe-shared-expert-overlap with --moe-latent-size": (
        "--moe-shared-expert-overlap --moe-latent-size 16 --num-experts 4 --moe-shared-expert-intermediate-size 16"
    ),
    "--cuda-graph-impl": "--cuda-graph-impl local",
    "--num-distributed-optimizer-instances > 1": "--num-distributed-optimizer-instances 2",
    "--tensor-parallel-num-weight-shards > 1": "--tensor-parallel-num-weight-shards 2",
    "--expert-tensor-parallel-num-weight-shards > 1": "--expert-tensor-parallel-num-weight-shards 2",
    "--mtp-num-layers without --hybrid-data-parallel": "--mtp-num-layers 1",
    "--multi-latent-attention without --hybrid-data-parallel": "--multi-latent-attention",
    "--multi-latent-attention of local layers without --hybrid-data-parallel": "--multi-latent-attention",
    "--multi-latent-attention with --position-embedding-type": (
        "--multi-latent-attention --position-embedding-type yarn"
    ),
    "--mla-down-proj-fusion": "--mla-down-proj-fusion --multi-latent-attention",
    "--mtp-num-layers in pipelines": "--mtp-num-layers 1 --pipeline-model-parallel-size 2",
    "--qk-l2-norm without experts": "--qk-l2-norm",
    "--apply-layernorm-1p of local layers": "--apply-layernorm-1p",
    "--init-model-with-meta-device without FSDP": "--init-model-with-meta-device",
    "--full-validation alone": "--full-validation",
    "--multiple-validation-sets alone": "--multiple-validation-sets",
    "--object-storage-cache-path": "--object-storage-cache-path cache",
    "--non-persistent-ckpt-type local": "--non-persistent-ckpt-type local",
    "--ckpt-step with --use-distributed-optimizer and --ckpt-format torch": (
        "--ckpt-step 3 --use-distributed-optimizer --ckpt-format torch"
    ),
    "--ddp-average-in-collective with --calculate-per-token-loss": (
        "--ddp-average-in-collective --calculate-per-token-loss"
    ),
    "--result-rejected-tracker-filename": "--result-rejected-tracker-filename tracker.txt",
    "--result-rejected-tracker-filename in a folder that cannot be written": (
        "--result-rejected-tracker-filename no/such/folder/tracker.txt"
    ),
    "--moe-routing-trace-path": "--moe-routing-trace-path trace",
    "--moe-router-topk 1 without --moe-router-pre-softmax": "--moe-router-topk 1 --num-experts 4",
    "--moe-permute-fusion on CPU": "--moe-permute-fusion --num-experts 4",
    "--moe-router-fusion on CPU": "--moe-router-fusion --num-experts 4",
    "--use-nccl-ub on CPU": "--use-nccl-ub",
    "--recompute-modules moe_act without --moe-grouped-gemm": (
        "--recompute-modules moe_act --recompute-granularity selective"
    ),
    **{
        f"--recompute-modules {module} without TransformerEngine": (
            f"--recompute-modules {module} --recompute-granularity selective --moe-grouped-gemm"
        )
        for module in ("layernorm", "moe_act", "gdn_norm_out")
    },
    "--moe-token-dispatcher-type flex on CPU": "--moe-token-dispatcher-type flex --num-experts 4",
    "--moe-grouped-gemm on CPU": "--moe-grouped-gemm --num-experts 4 --disable-bias-linear",
    "--ckpt-format fsdp_dtensor without --use-megatron-fsdp": "--ckpt-format fsdp_dtensor",
    "--moe-routing-trace-path on CPU": "--moe-routing-trace-path trace",
    "--optimizer": "--optimizer soap",
    "--optimizer of another package with sharded float32": "--optimizer muon --use-distributed-optimizer",
    "--optimizer of another package": "--optimizer muon",
    "--optimizer-cpu-offload on CPU": "--optimizer-cpu-offload",
    "--sharp-enabled-group": "--sharp-enabled-group dp",
    "--experimental-attention-variant": "--experimental-attention-variant dsa",
    "--hybrid-layer-pattern": "--hybrid-layer-pattern M*",
    "--hybrid-override-pattern": "--hybrid-override-pattern M*",
    "--heterogeneous-layers-config-path": "--heterogeneous-layers-config-path layers.json",
    "--heterogeneous-layers-config-encoded-json": "--heterogeneous-layers-config-encoded-json {}",
    "--spec": "--spec local",
    "--transformer-impl inference_optimized": "--transformer-impl inference_optimized",
    "--num-query-groups": "--num-query-groups 3 --group-query-attention",
    "--attention-backend": "--attention-backend flash",
    "--max-seqlen-per-dp-cp-rank": "--max-seqlen-per-dp-cp-rank 64",
    "--window-size other than N,0": "--window-size 64,64",
    "--window-size other than N,0 of local layers": "--window-size 0,0",
    "--window-attn-skip-freq alone": "--window-attn-skip-freq 2",
    "--window-attn-skip-freq of another length": "--window-attn-skip-freq [0,1,1] --window-size 64,0",
    "--context-parallel-size > 1 of local layers": "--context-parallel-size 2",
    "--apply-query-key-layer-scaling of local layers": "--apply-query-key-layer-scaling",
    "--reset-attention-mask of local layers": "--reset-attention-mask",
    "--attention-dropout > 0": "--attention-dropout 0.1",
    "--position-embedding-type": "--position-embedding-type relative",
    "--yarn-original-max-position-embeddings without YaRN": "--yarn-original-max-position-embeddings 64",
    "--yarn-beta-fast without YaRN": "--yarn-beta-fast 2",
    "--yarn-beta-slow without YaRN": "--yarn-beta-slow 2",
    "--yarn-correction-range-round-to-int without --position-embedding-type yarn": (
        "--yarn-correction-range-round-to-int"
    ),
    "--rotary-scaling-factor without YaRN": "--rotary-scaling-factor 8",
    "--mscale without YaRN": "--mscale 2",
    "--mscale-all-dim without YaRN": "--mscale-all-dim 2",
    "--rope-type without --multi-latent-attention": "--rope-type rope",
    "--use-rope-scaling without plain rotary positions": "--use-rope-scaling --position-embedding-type yarn",
    "--rope-scaling-factor without --use-rope-scaling": "--rope-scaling-factor 4",
    "--rotary-seq-len-interpolation-factor without plain rotary positions": (
        "--rotary-seq-len-interpolation-factor 4 --position-embedding-type yarn"
    ),
    "--rotary-percent without plain rotary positions": "--rotary-percent 0.5 --position-embedding-type yarn",
    "--rotary-base without rotary positions": "--rotary-base 500 --position-embedding-type learned_absolute",
    "--rotary-interleaved without plain rotary positions": "--rotary-interleaved --position-embedding-type yarn",
    "--no-rope-freq without rotary positions": "--no-rope-freq 2 --position-embedding-type learned_absolute",
    "--vocab-extra-ids": "--vocab-extra-ids 7",
    "--verify-integrity with another --ckpt-format than torch_dist": "--verify-integrity --ckpt-format torch",
    "--save-activations-interval without TransformerEngine": "--save-activations-interval 1",
    "--save-dgrads-interval without TransformerEngine": "--save-dgrads-interval 1",
    "--config-logger-dir": "--config-logger-dir settings",
    "--use-te-activation-func of local layers": "--use-te-activation-func",
    "--fp16-lm-cross-entropy": "--fp16-lm-cross-entropy --fp16",
    "--fp32-residual-connection of local layers": "--fp32-residual-connection --bf16",
    "--fp8-format": "--fp8-format hybrid",
    "--fp8-format without --hybrid-data-parallel": "--fp8-format hybrid",
    "--fp8-format of local layers": "--fp8-format hybrid",
    "--fp4-format": "--fp4-format e2m1",
    "--te-precision-config-file": "--te-precision-config-file precision.yaml",
    "--cpu-offloading-num-layers": "--cpu-offloading-num-layers 1",
    "--rampup-batch-size without --hybrid-data-parallel": "--rampup-batch-size 4 4 100",
    "--rampup-batch-size with --hdp-global-tokens": "--rampup-batch-size 4 4 100 --hdp-global-tokens 512",
    "--step-batch-size-schedule with --hdp-global-tokens": "--step-batch-size-schedule 0:8 --hdp-global-tokens 512",
    "--train-samples with --hdp-global-tokens": "--train-samples 8 --hdp-global-tokens 512",
    "--hdp-loader ray with --hdp-global-tokens": "--hdp-loader ray --hdp-global-tokens 512",
    "--loss-normalization documents with --sculpt-windows": "--loss-normalization documents --sculpt-windows a",
    "--loss-normalization groups without --sft": "--loss-normalization groups",
    "--loss-normalization documents with --draft-heads": "--loss-normalization documents --draft-heads medusa",
    "--hdp-blend-by tokens with --hdp-loader ray": "--hdp-blend-by tokens --hdp-loader ray",
    "--hdp-blend-by tokens with --sculpt-windows": "--hdp-blend-by tokens --sculpt-windows a.windows.npy",
    "--sculpt-windows with --hdp-global-tokens": "--sculpt-windows a.windows.npy --hdp-global-tokens 512",
    "--iterations-to-skip": "--iterations-to-skip 3",
    "--phase-transition-iterations": "--phase-transition-iterations 3",
    "--per-dataset-sequences-path": "--per-dataset-sequences-path sequences.json",
    "--dataloader-type cyclic": "--dataloader-type cyclic",
    "--micro-batch-size > 1": "--micro-batch-size 2",
    "--eval-micro-batch-size > 1": "--eval-micro-batch-size 2",
    "--logits-save-dir": "--logits-save-dir logits",
    "--logits-load-dir": "--logits-load-dir logits",
    "--optimizer sgd with --ckpt-format torch_dist": (
        "--optimizer sgd --ckpt-format torch_dist --load unread --save-interval 1"
    ),
    "--optimizer sgd with sharded states": "--optimizer sgd --use-distributed-optimizer",
    "--optimizer of another package with --fp16": "--optimizer muon --fp16",
    "--optimizer of another package with --overlap-param-gather-with-optimizer-step": (
        "--optimizer muon --overlap-param-gather-with-optimizer-step"
    ),
    "--optimizer of another package with --num-distributed-optimizer-instances > 1": (
        "--optimizer lion --num-distributed-optimizer-instances 2"
    ),
    "--hidden-dropout > 0 without --hybrid-data-parallel": "--hidden-dropout 0.1",
    "--recompute-granularity": "--recompute-granularity full",
    "--mlp-chunks-for-training": "--mlp-chunks-for-training 2",
}
SWITCHES = (
    "hybrid-context-parallel enable-cuda-graph external-cuda-graph optimizer-cuda-graph use-megatron-fsdp "
    "use-torch-fsdp2 tp-comm-overlap use-kitchen-attention apply-query-key-layer-scaling "
    "fine-grained-activation-offloading decrease-batch-size-if-needed "
    "full-validation multiple-validation-sets fim-data mock-data dataloader-fast-cache-load "
    "dataloader-defer-npy-index-mmap dataloader-inter-document-masking reset-position-ids reset-attention-mask "
    "eod-mask-loss "
    "overlap-moe-expert-parallel-comm moe-paged-stash moe-enable-routing-replay "
    "no-align-param-gather defer-embedding-wgrad-compute delay-wgrad-compute overlap-param-gather-with-optimizer-step "
    "use-checkpoint-args inprocess-restart perform-rl-step vision-pretraining "
    "allow-ambiguous-pad-tokens freeze-all-layers log-straggler check-for-spiky-loss ddp-average-in-collective "
    "use-sharp init-method-xavier-uniform apply-residual-connection-post-layernorm "
    "openai-gelu cache-mla-latents exit-signal-handler-for-dataloader dist-ckpt-save-pre-mcore-014"
).split()
EXAMPLES.update({f"--{switch}": f"--{switch}" for switch in SWITCHES})


WITHOUT = {  # words of COMMON
    "--num-experts with biases of local layers without --hybrid-data-parallel": "--disable-bias-linear",
}
TABLES = (hdp, slices, loss_chunks, activations)
ALL_ROWS: list[Refusal] = [*(row for table in TABLES for row in table.REFUSALS), *REFUSALS, *POSITION_REFUSALS]
ROWS = [row for row in ALL_ROWS if row.flag.split()[0] not in LATER]
PAIRS = [(row, feature) for row in ROWS for feature in row.instead]


def answer(rank: int, world: int, lines: Sequence[list[str]]) -> list[str]:
    """Return the error of each command line, or "accepted"; emerging-optimizers cannot be imported."""
    sys.modules["emerging_optimizers"] = None  # type: ignore[assignment]
    return [answer_one(words) for words in lines]


def answer_one(words: list[str]) -> str:
    from megatron.training.arguments import parse_args

    from megatron.bytescale import features
    from megatron.bytescale.arguments import parse

    os.environ["WORLD_SIZE"] = "4"
    sys.argv = ["pretrain_gpt_hdp.py", *words]
    try:
        args = parse_args(parse.add_arguments)
        parse.set_device_defaults(args, sys.argv, on_cpu=True, has=parse.named_or_installed(sys.argv))
        features.check(args)
        return "accepted"
    except ValueError as error:
        return str(error)
    except SystemExit:
        return "argparse refuses it"


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], str]:
    """Return the error of each row with each feature that refuses it, in one process for all."""
    lines = [
        [word for word in COMMON if word != WITHOUT.get(row.flag)]
        + [*SWITCHED_ON[feature], *EXAMPLES[row.flag].split()]
        for row, feature in PAIRS
    ]
    found = run_ranks(answer, 1, lines, init_group=False)[0]
    return {(row.flag, feature): text for (row, feature), text in zip(PAIRS, found, strict=True)}


def test_each_row_has_an_example() -> None:
    assert {row.flag for row in ROWS} == set(EXAMPLES)
    assert all(row.flag.split()[0] == EXAMPLES[row.flag].split()[0] for row in ROWS)
    assert all(row.instead for row in ROWS)


@pytest.mark.ranks
@pytest.mark.parametrize(("row", "feature"), PAIRS, ids=lambda part: getattr(part, "flag", part))
def test_the_setting_is_refused_by_name(row, feature, answers: dict[tuple[str, str], str]) -> None:  # type: ignore[no-untyped-def]
    found = answers[row.flag, feature]
    assert row.message(feature, FLAGS[feature]) in found.splitlines()
    assert row.flag in found
    assert "{" not in found.replace("{}", "", row.flag.count("{}"))


@pytest.mark.ranks
def test_each_feature_is_accepted_without_those_settings() -> None:
    lines = [[*COMMON, *words] for words in SWITCHED_ON.values()]
    assert run_ranks(answer, 1, lines, init_group=False)[0] == ["accepted"] * len(lines)


def test_rows_name_features_of_the_table() -> None:
    named = [(row.flag, name) for row in refusals() for name in row.instead]
    assert {name for _, name in named} <= {feature.name for feature in FEATURES} | {ALWAYS}
    assert len(set(named)) == len(named), "a feature refuses a setting once"


def test_only_enabled_features_refuse() -> None:
    rows = [refuse("--one > 1", "a b", "use {}", above("one", 1), b="leave it at 1")]
    args = argparse.Namespace(one=2)
    refuse_conflicts(args, {"c": "--c"}, rows)
    with pytest.raises(ValueError, match=r"^--a does not work with --one > 1: use --a$"):
        refuse_conflicts(args, {"a": "--a"}, rows)
    with pytest.raises(ValueError, match=r"^--b does not work with --one > 1: leave it at 1$"):
        refuse_conflicts(args, {"b": "--b"}, rows)
    refuse_conflicts(argparse.Namespace(one=1), {"a": "--a"}, rows)


def test_a_row_of_every_run_refuses_unless_a_feature_says_more() -> None:
    rows = [refuse("--one", "always", "remove it", a="use --a alone")]
    args = argparse.Namespace(one=True)
    with pytest.raises(ValueError, match=r"^bytescale does not work with --one: remove it$"):
        refuse_conflicts(args, {}, rows)
    with pytest.raises(ValueError, match=r"^--a does not work with --one: use --a alone$"):
        refuse_conflicts(args, {"a": "--a"}, rows)
