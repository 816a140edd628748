"""Parsing: defaults of the device, flags that need a feature, folders."""

from __future__ import annotations

import argparse

import pytest

from megatron.bytescale.arguments.parse import NEEDS, set_device_defaults, whole_parser, without_fractions
from megatron.bytescale.arguments.vocabulary import pad_vocabulary
from tests.bytescale.arguments.resolving import resolve_lines, resolved
from tests.e2e.training import HDP, MODEL, TRAIN

COMMON = [*MODEL, *TRAIN, *HDP, "--data-path", "unread"]


@pytest.mark.ranks
def test_cpu_defaults_need_no_flag() -> None:
    values = resolved(1, *MODEL, *TRAIN, "--micro-batch-size", 1, "--data-path", "unread").args
    assert values["transformer_impl"] == "local"
    assert values["distributed_backend"] == "gloo"
    assert values["use_cpu_initialization"] is True
    for name in ("apply_rope_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_swiglu_fusion",
                 "bias_gelu_fusion", "bias_dropout_fusion"):  # fmt: skip
        assert values[name] is False, name


STOCK = [*MODEL, *TRAIN, "--attention-dropout", 0]
# (words of a launch line, start of the refusal)
REFUSED: list[tuple[list[object], str]] = [
    (["--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine: there is no GPU"),
    (
        ["--micro-batch-size", 1, "--data-path", "unread", "--cost-file", "cost.json"],
        "--cost-file needs --hybrid-data-parallel or --seq1f1b-slices or --activation-policy",
    ),
    ([*HDP, "--data-path", "unread", "--cost-file", "cost.json"], "cost file cost.json: No such file"),
    (["--hdp-loader", "ray"], "--hdp-loader needs --hybrid-data-parallel"),
    (["--hdp-ray-servers", 2], "--hdp-ray-servers needs --hdp-loader ray"),
    (["--hdp-ray-address", "host:1"], "--hdp-ray-address needs --hdp-loader ray"),
    (["--hdp-json-key", "body"], "--hdp-json-key needs --hdp-loader ray"),
    (["--hdp-kept-keys", 5], "--hdp-kept-keys needs --seq1f1b-slices of 2 or more"),
    (["--hdp-kept-keys", 5, "--seq1f1b-slices", 2], "--hdp-kept-keys needs --hybrid-data-parallel"),
]


@pytest.mark.ranks
def test_flags_need_the_feature_that_they_belong_to() -> None:
    found = resolve_lines(*((4, [*STOCK, *words]) for words, _ in REFUSED))
    for outcome, (_, message) in zip(found, REFUSED, strict=True):
        assert outcome.error is not None
        assert outcome.error.startswith(message)


ENGINE, APEX = "transformer_engine", ("apex", "fused_weight_gradient_mlp_cuda", "scaled_masked_softmax_cuda")


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ((), ("local", False, False, False, True)),
        ((ENGINE,), (ENGINE, True, False, False, True)),
        (APEX, ("local", False, True, True, False)),
        ((ENGINE, *APEX), (ENGINE, True, True, True, False)),
        (("flash_attn",), ("local", False, False, False, True)),
        ((ENGINE, *APEX, "flash_attn"), (ENGINE, True, True, True, False)),
    ],
    ids=["nothing", "TransformerEngine", "Apex", "TransformerEngine and Apex", "flash-attn", "all"],
)
def test_defaults_on_a_gpu_follow_what_can_be_imported(
    installed: tuple[str, ...], expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install .[gpu]`` installs TransformerEngine without Apex, which Megatron's output layer requires."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    args = stock_arguments()
    set_device_defaults(args, [], on_cpu=False)
    fusions = (args.apply_rope_fusion, args.gradient_accumulation_fusion, args.masked_softmax_fusion)
    assert (args.transformer_impl, *fusions, args.no_persist_layer_norm) == expected
    assert args.bias_swiglu_fusion is True
    assert args.distributed_backend == "nccl"
    switched_off = stock_arguments(gradient_accumulation_fusion=False, apply_rope_fusion=False)
    set_device_defaults(switched_off, [], on_cpu=False)
    assert switched_off.gradient_accumulation_fusion is switched_off.apply_rope_fusion is False


@pytest.mark.parametrize(
    ("given", "is_fused"),
    [({}, True), ({"num_experts": 4}, False), ({"num_experts": 4, "quick_geglu": True}, True)],
    ids=["dense", "experts", "gated experts"],
)
def test_experts_have_no_fused_gelu(given: dict[str, object], is_fused: bool) -> None:
    """Megatron's experts raise ValueError in the first step with its default, the fused GELU."""
    args = stock_arguments(**given)
    set_device_defaults(args, [], on_cpu=False)
    assert args.bias_gelu_fusion is is_fused


def stock_arguments(**changes: object) -> argparse.Namespace:
    """Return Megatron's defaults of settings that depend on the machine."""
    fusions = [*NEEDS, "bias_gelu_fusion", "bias_swiglu_fusion", "bias_dropout_fusion"]
    values = {"transformer_impl": ENGINE, "no_persist_layer_norm": False, "distributed_backend": "nccl",
              "use_cpu_initialization": False, "tensor_model_parallel_size": 1,
              "moe_token_dispatcher_type": "alltoall", "num_experts": None, "swiglu": False,
              "quick_geglu": False}  # fmt: skip
    return argparse.Namespace(**{**dict.fromkeys(fusions, True), **values, **changes})


def test_fractions_of_rotary_positions() -> None:
    words = ["--rotary-base", "10000.5", "--rotary-seq-len-interpolation-factor", "2"]
    args = whole_parser().parse_args(words)
    assert (args.rotary_base, args.rotary_seq_len_interpolation_factor) == (10000.5, 2)
    assert type(args.rotary_seq_len_interpolation_factor) is int
    assert without_fractions(["a", *words, "--rotary-base=1.5", "--lr", "1"]) == ["a", "--lr", "1"]


@pytest.mark.parametrize(("given", "ranks", "rows"), [(101, 1, 101), (101, 2, 102), (102, 2, 102), (None, 2, None)])
def test_rows_are_shared_equally_by_tensor_ranks(given: int | None, ranks: int, rows: int | None) -> None:
    args = argparse.Namespace(padded_vocab_size=given, tensor_model_parallel_size=ranks)
    pad_vocabulary(args)
    assert (args.padded_vocab_size, args.unpadded_vocab_size) == (rows, given)
