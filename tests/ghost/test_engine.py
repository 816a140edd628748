"""Trainings with TransformerEngine's own Python on ghost GPUs: losses equal CPU ranks without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.training import step_losses, train, train_ranks
from tests.ghost.cases import BUCKETS, CASES, EXPERTS, ONE, PP2, TENSORS, TWO, Case
from tests.ghost.devices import APEX_GPUS, ENGINE_GPUS, needs_ghosts
from tests.ghost.engine import needs_engine
from tests.ghost.training import train_drawn, train_on_cpus
from tests.harness import Devices, ranks_on

pytestmark = [pytest.mark.ranks, pytest.mark.full, needs_ghosts, needs_engine]

LAYER = ("generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd")
WITHOUT = ("zero bubble",)  # the product refuses it
LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
NORMED = f"{LATENT} --q-lora-rank 24 --qk-layernorm"
ALONE = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --hdp-attention-kernel reference"
LATENT_CASES = (
    Case("latent attention", 2, f"{TWO} {LATENT}"),
    Case("latent attention, normed, sequence parallel", 2, f"{ONE} {TENSORS} {NORMED}"),
    Case("latent attention, normed, tensor parallel", 2, f"{ONE} {ALONE} {NORMED}", is_bf16=False),
)


HOST = "--host-memory-gb 0.02"
POLICIES = {
    "memo": f"--activation-policy memo --swap-fraction 0.4 {HOST}",
    "priced": f"--activation-policy priced --swap-fraction 0.3 --recompute-fraction 0.5 {HOST}",
    "swap": f"--swap-fraction 1 {HOST}",
}
IN_ALL = f"{EXPERTS} --moe-layer-freq [1]*4 --moe-router-load-balancing-type none"
POLICY_CASES = (
    Case("rings", 2, f"{TWO} {BUCKETS} {NORMED}"),
    Case("queries without latent", 1, f"{ONE} {LATENT} --qk-layernorm --v-head-dim 12"),
    Case("sequence parallel", 2, f"{ONE} {TENSORS} {NORMED}"),
    Case("slices", 2, f"{TWO} {NORMED} --seq1f1b-slices 3"),
    Case("experts", 2, f"{TWO} {NORMED} {IN_ALL}"),
    Case("later tokens", 2, f"{TWO} --mtp-num-layers 1"),
    Case("latent attention of later tokens", 2, f"{TWO} {NORMED} --mtp-num-layers 2"),
)


def train_with_engine(called: tuple[str, ...]) -> None:
    """Entry with weights drawn by name; it checks that the training has called these played functions."""
    from tests.ghost.played import num_calls

    train_drawn()
    assert set(called) <= num_calls.keys(), num_calls


def train_and_compare_swaps() -> None:
    """Entry that checks that each step swaps the bytes that plans list.

    Plans leave out statistics of norms and the angles of fused rotary embeddings, of 40 bytes in 750 here.
    """
    from bytescale_ext.activation.store import ActivationStore
    from megatron.bytescale.features.activations import build

    listed: list[float] = []
    load_of, check_empty = build.load_of_micro_batch, ActivationStore.check_empty

    def note(config: Any, packed: Any) -> Any:
        load, share = load_of(config, packed)
        plan = config.plan(load, share)
        each = sum(plan.shares(tensor)[0] * tensor.bytes_per_token for tensor in load.tensors)
        listed.append((load.num_layers - plan.resident_layers) * load.num_tokens * each)
        return load, share

    def check_and_compare(store: Any) -> None:
        check_empty(store)
        assert store.counts.swapped_bytes == pytest.approx(sum(listed), rel=0.06)
        listed.clear()

    build.load_of_micro_batch, ActivationStore.check_empty = note, check_and_compare  # type: ignore[method-assign]
    train_drawn()


def check(case: Case, devices: Devices, flags: str, called: tuple[str, ...], corpus: Path, folder: Path) -> None:
    """Compare the losses of a training with further flags on these devices with CPU ranks without the flags."""
    words = [*case.argv(corpus, folder / "engine"), "--transformer-impl", "transformer_engine", *flags.split()]
    with ranks_on(devices):
        outcomes = train_ranks(case.num_ranks, *words, entry=partial(train_with_engine, called))
    assert not any(outcome.code for outcome in outcomes), outcomes[0].text[-3000:]
    train_on_cpus(case.num_ranks, *case.argv(corpus, folder / "cpu"))
    assert step_losses(folder / "engine") == pytest.approx(step_losses(folder / "cpu"), rel=case.tolerance)


@pytest.mark.parametrize("case", [case for case in (*CASES, *LATENT_CASES) if case.name not in WITHOUT], ids=str)
def test_losses_equal_cpu_ranks(case: Case, corpus: Path, tmp_path: Path) -> None:
    check(case, ENGINE_GPUS, "", LAYER, corpus, tmp_path)


@pytest.mark.parametrize("case", POLICY_CASES, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_under_policies_equal_losses_without(policy: str, case: Case, corpus: Path, tmp_path: Path) -> None:
    more = ["--num-layers", 4, "--transformer-impl", "transformer_engine"]
    with ranks_on(ENGINE_GPUS):
        train(case.num_ranks, *case.argv(corpus, tmp_path / "none"), *more, entry=train_drawn)
        words = [*case.argv(corpus, tmp_path / policy), *more, *POLICIES[policy].split()]
        entry = train_drawn if "--seq1f1b-slices" in words else train_and_compare_swaps  # plans pad their slices
        outcomes = train_ranks(case.num_ranks, *words, entry=entry)
    assert not any(outcome.code for outcome in outcomes), outcomes[0].text[-3000:]
    assert step_losses(tmp_path / policy) == step_losses(tmp_path / "none")


def test_grouped_products_of_experts(corpus: Path, tmp_path: Path) -> None:
    experts = f"{EXPERTS} --moe-layer-freq [1,1] --moe-router-load-balancing-type none"
    case = Case("experts", 2, f"{TWO} {experts}")
    check(case, ENGINE_GPUS, "--moe-grouped-gemm", ("te_general_grouped_gemm",), corpus, tmp_path)


@pytest.mark.parametrize("flags", [f"{TWO} {BUCKETS}", f"{ONE} {TENSORS}"], ids=["rings", "tensors"])
def test_fused_weight_gradients_of_apex(flags: str, corpus: Path, tmp_path: Path) -> None:
    check(Case("fused", 2, flags), APEX_GPUS, "", (*LAYER, "wgrad_gemm_accum_fp32"), corpus, tmp_path)


# Flags of trainings in FP8, and the played functions that they call. Sizes are multiples of 16.
IN_FP8 = {
    "rings": (f"{TWO} {BUCKETS}", ()),
    "slices": (f"{PP2} --seq1f1b-slices 3", ()),
    "tensors": (f"{ONE} {TENSORS} --ffn-hidden-size 64", ("create_empty_quantized_tensor",)),
    "experts": (
        f"{TWO} {EXPERTS} --moe-ffn-hidden-size 32 --moe-grouped-gemm --moe-layer-freq [1,1] "
        "--moe-router-load-balancing-type none",
        ("te_general_grouped_gemm", "split_quantize", "fused_multi_row_padding", "fused_multi_row_unpadding"),
    ),
}


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("name", IN_FP8)
def test_losses_in_fp8_are_near_those_in_bf16(name: str, recipe: str, corpus: Path, tmp_path: Path) -> None:
    """Products in FP8 refuse factors whose rows the plan has not padded."""
    flags, called = IN_FP8[name]
    called = (
        () if (name, recipe) == ("tensors", "blockwise") else called
    )  # parts smaller than a block are gathered in bf16
    number = "hybrid" if recipe == "tensorwise" else "e4m3"
    runs = {"bf16": ("", ()), "fp8": (f"--fp8-format {number} --fp8-recipe {recipe}", ("quantize", *called))}
    losses = {}
    for kind, (more, functions) in runs.items():
        words = Case(name, 2, f"{flags} --transformer-impl transformer_engine {more}").argv(corpus, tmp_path / kind)
        with ranks_on(ENGINE_GPUS):
            outcomes = train_ranks(2, *words, entry=partial(train_with_engine, (*LAYER, *functions)))
        assert not any(outcome.code for outcome in outcomes), outcomes[0].text[-3000:]
        losses[kind] = step_losses(tmp_path / kind)
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.05)
    assert losses["fp8"] != pytest.approx(losses["bf16"], rel=1e-5)
