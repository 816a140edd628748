"""The profile of a tiny model: real micro-batches in Megatron's model, with made-up clocks, and what it refuses."""

from __future__ import annotations

import argparse
import contextlib
import io
from typing import Any

import pytest

from bytescale_ext.plan.check import check_step_plan
from bytescale_ext.plan.cost import CostModel, ModelCost
from bytescale_ext.plan.shapes import Shard
from tests.harness import RanksFailed, preload, run_ranks

MODEL = (
    "--num-layers 8 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 61"
).split()
# What a training command has beside its model; the profile has no use for it.
TRAINING = (
    "--hybrid-data-parallel --hdp-tokens-per-rank 16 --hdp-plan-ahead 3 --seq-length 64 --max-position-embeddings 64 "
    "--global-batch-size 24 --train-samples 100 --lr 1e-3 --lr-warmup-samples 2 --lr-decay-samples 9 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --pipeline-model-parallel-size 4 "
    "--data-path nowhere --save nowhere/save --load nowhere/load --tensorboard-dir nowhere/board"
).split()
LAYER = {"forward": CostModel(4e-9, 1.6e-6, 0, 1e-4), "backward": CostModel(1e-8, 3.2e-6, 0, 2e-4)}
HEAD = {"forward": 1e-6, "backward": 2e-6}


@pytest.fixture(autouse=True, scope="module")
def megatron_is_loaded() -> None:
    preload("tests.e2e.preload")


def made_up_seconds(num_layers: int, lengths: list[int], direction: str) -> float:
    layer = LAYER[direction].scaled(num_layers)
    return layer.g + sum(layer.sequence_cost(length, 1) for length in lengths) + HEAD[direction] * sum(lengths)


def profile_with_made_up_clock(
    rank: int, world: int, flags: list[str], run_really: bool
) -> tuple[ModelCost, list[float]]:
    """What ``bytescale profile`` measures when each micro-batch takes ``made_up_seconds``."""
    from megatron.bytescale.cli import profile as command
    from megatron.bytescale.training import profile

    run = profile.run_micro_batch

    def timed(runtime: Any, model: Any, packed: Any) -> Any:
        if run_really:
            kinds = [mark.kind for mark in run(runtime, model, packed)]
            assert kinds == ["wait", "forward", "backward", "end"], kinds
        lengths = [shard.num_tokens for shard in packed.micro_batch.shards]
        layers = profile.unwrap_model(model).config.num_layers
        return tuple(made_up_seconds(layers, lengths, direction) for direction in ("forward", "backward"))

    profile.run_micro_batch = timed
    profile.seconds_between = lambda marks, subject: marks
    args = argparse.Namespace(flags=flags, max_tokens=96, repeats=1, cpu=True, ring_bytes_per_second=1e9)
    with contextlib.redirect_stdout(io.StringIO()):
        cost, found, _ = command.measure(args, on_cpu=True)
    return cost, [one.error for one in found]


def check_made_up_cost(cost: ModelCost, errors: list[float]) -> None:
    for direction in ("forward", "backward"):
        found, true = getattr(cost, direction), LAYER[direction]
        assert (found.a, found.b, found.g) == pytest.approx((true.a, true.b, true.g), rel=1e-6)
        assert getattr(cost, f"head_{direction}") == pytest.approx(HEAD[direction], rel=1e-5)
    assert max(map(abs, errors)) < 1e-9


def test_a_training_command_is_profiled_as_it_is() -> None:
    cost, errors = run_ranks(profile_with_made_up_clock, 1, [*MODEL, *TRAINING], True)[0]
    check_made_up_cost(cost, errors)
    shape = cost.shape
    assert (shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads) == (8, 32, 4, 2)
    assert (shape.head_dim, shape.ffn_hidden, shape.gated, shape.vocab) == (8, 48, True, 128)
    assert (cost.dtype, cost.tensor_parallel) == ("float32", 1)
    assert cost.device.startswith("CPU")
    # keys and values of two heads of 8 numbers, 4 bytes each, at the given 1 GB/s; their gradients go too
    assert cost.forward.c == pytest.approx(2 * 2 * 8 * 4 / 1e9)
    assert cost.backward.c == pytest.approx(2 * cost.forward.c)
    assert "--ring-bytes-per-second" in cost.source and "kernel" in cost.source


def test_bytes_that_are_kept() -> None:
    cost, _ = run_ranks(profile_with_made_up_clock, 1, MODEL, False)[0]
    assert cost.recompute_bytes == 4 * 32  # the layer's input
    # 4 bytes each: norms, projections' inputs, query, key, value, output, both halves of the MLP, its product, ...
    assert 4 * (4 * 32 + 2 * 48) < cost.layer_bytes < 4 * 40 * 32
    selective = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    leaner, _ = run_ranks(profile_with_made_up_clock, 1, [*MODEL, *selective], False)[0]
    assert cost.recompute_bytes == leaner.recompute_bytes < leaner.layer_bytes < cost.layer_bytes
    assert "with selective recompute" in leaner.source


def test_full_recompute_and_bf16() -> None:
    flags = [*MODEL, "--bf16", "--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1"]  # fmt: skip
    cost, _ = run_ranks(profile_with_made_up_clock, 1, flags, True)[0]
    assert cost.dtype == "bfloat16" and "with full recompute" in cost.source
    assert cost.recompute_bytes == 2 * 32 < cost.layer_bytes  # also then the second is what it would be without
    assert cost.backward.c == pytest.approx(3 * cost.forward.c)  # gradients travel in float32


def test_tensor_parallel_ranks_profile_together() -> None:
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    (cost, errors), (other, _) = run_ranks(profile_with_made_up_clock, 2, flags, True)
    check_made_up_cost(cost, errors)
    assert cost.tensor_parallel == 2 and cost.shape.num_heads == 4 and cost.shape.vocab == 256
    assert cost.forward.c == pytest.approx(2 * 1 * 8 * 4 / 1e9)
    assert other.forward.b == pytest.approx(cost.forward.b)


def test_real_times_are_positive() -> None:
    for found in run_ranks(real_times, 1)[0]:
        assert len(found) == 4 and min(found) > 0


def real_times(rank: int, world: int) -> list[tuple[float, ...]]:
    from megatron.bytescale.training.profile import prepare, time_packs

    with contextlib.redirect_stdout(io.StringIO()):
        subject = prepare(MODEL, 64, on_cpu=True)
        timings = time_packs(subject, [(64,), (16, 8)], repeats=1)
    assert [timing.lengths for timing in timings] == [(64,), (16, 8)] * 2
    assert subject.runtime.step is None
    return [tuple(t.forward_seconds for t in timings), tuple(t.backward_seconds for t in timings)]


def refusal(rank: int, world: int, flags: list[str]) -> str:
    from megatron.bytescale.training.profile import prepare

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            prepare(flags, 64, on_cpu=True)
        except ValueError as error:
            return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tensor-model-parallel-size 2", "needs 2 processes and there are 1: torchrun --nproc-per-node 2"),
        ("--num-experts 4", "--num-experts: a cost file has no entry for experts"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", "--recompute-method block"),
        ("--attention-dropout 0.1", "--attention-dropout > 0"),
        ("--hdp-attention-kernel none", "none"),
        ("--num-attention-heads 5", "--num-query-groups: make it a divisor"),
    ],
)
def test_what_cannot_be_profiled_is_refused(flags: str, said: str) -> None:
    message = run_ranks(refusal, 1, [*MODEL, *flags.split()], init_group=False)[0]
    assert said in message and "\n" not in message


def test_an_unknown_flag_ends_the_command() -> None:
    with pytest.raises(RanksFailed, match="SystemExit: 2"):
        run_ranks(refusal, 1, [*MODEL, "--no-such-flag"], init_group=False)


def test_every_rank_has_its_own_copy_of_the_packs() -> None:
    plan = run_ranks(plan_of_packs, 1, init_group=False)[0]
    check_step_plan(plan)
    assert plan.lengths == (5, 3, 8, 5, 3, 8)
    assert plan.ranks[1][0].shards == (Shard(3, ((0, 5),), (1,)), Shard(4, ((0, 3),), (1,)))


def plan_of_packs(rank: int, world: int) -> Any:
    from megatron.bytescale.training.profile import local_plan

    return local_plan([(5, 3), (8,)], 2, 16)


def test_made_up_documents_repeat() -> None:
    first, again, last = run_ranks(read_documents, 1, init_group=False)[0]
    assert first == again and len(first) == 4 and max(first) < 7
    assert len(last) == 2  # nothing follows the last token


def read_documents(rank: int, world: int) -> list[list[int]]:
    from megatron.bytescale.training.profile import RandomTokens

    source = RandomTokens([9, 4], 7)
    assert len(source) == 2 and source.length(1) == 4 and "1" in source.describe(1)
    return [source.read(*place).tolist() for place in ((0, 1, 5), (0, 1, 5), (1, 2, 5))]
