"""Profile of a tiny model: real micro-batches in Megatron's model, fake clocks, and refusals."""

from __future__ import annotations

import argparse
import contextlib
import io
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.measure.cost_file import check_same_model
from bytescale_ext.measure.fit import Timing
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.micro_batch import Shard
from tests.bytescale.runtimes import runtime_of
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

MODEL = (
    "--num-layers 8 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 61"
).split()
# Flags of a training command that do not describe the model. The profile ignores them.
TRAINING = (
    "--hybrid-data-parallel --hdp-tokens-per-rank 16 --hdp-plan-ahead 3 --seq-length 64 --max-position-embeddings 64 "
    "--global-batch-size 24 --train-samples 100 --lr 1e-3 --lr-warmup-samples 2 --lr-decay-samples 9 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --pipeline-model-parallel-size 4 "
    "--data-path nowhere --save nowhere/save --load nowhere/load --tensorboard-dir nowhere/board"
).split()
LAYER = {"forward": CostModel(4e-9, 1.6e-6, 0, 1e-4), "backward": CostModel(1e-8, 3.2e-6, 0, 2e-4)}
HEAD = {"forward": 1e-6, "backward": 2e-6}


RING = {"forward": 3e-6, "backward": 5e-6}  # h
BLOCK = {"forward": 1e-5, "backward": 4e-5}  # m


def made_up_seconds(num_layers: int, lengths: list[int], width: int, direction: str) -> float:
    layer = replace(LAYER[direction], h=RING[direction], m=BLOCK[direction]).scaled(num_layers)
    work = sum(layer.sequence_cost(length, width) for length in lengths)
    return layer.g + work + HEAD[direction] * sum(lengths) / width


def profile_with_made_up_clock(
    rank: int, world: int, flags: list[str], run_really: bool
) -> tuple[ModelCost, list[float]]:
    """Return the costs of ``bytescale profile`` if each micro-batch takes ``made_up_seconds``."""
    from megatron.bytescale.cli import profile as command
    from megatron.bytescale.training import profile

    run = profile.run_micro_batch

    def timed(runtime: Any, model: Any, packed: Any) -> Any:
        if run_really:
            kinds = [mark.kind for mark in run(runtime, model, packed)]
            assert kinds == ["wait", "forward", "backward", "end"], kinds
        shards = packed.micro_batch.shards
        lengths, width = [runtime.step.batch.plan.lengths[shard.seq] for shard in shards], len(shards[0].ring)
        assert width in (1, runtime.run.cluster.num_ranks)
        layers = profile.unwrap_model(model).config.num_layers
        return tuple(made_up_seconds(layers, lengths, width, direction) for direction in ("forward", "backward"))

    measure = profile.block_seconds

    def blocks(ring: Any, attention: Any, timer: Any) -> tuple[float, ...]:
        if run_really:
            assert len(measure(ring, attention, timer)) == 2
        (lengths, width), bare = ring, CostModel(0.0, 0.0)
        layers = (replace(bare, h=RING[name], m=BLOCK[name]) for name in ("forward", "backward"))
        return tuple(sum(layer.sequence_cost(length, width) for length in lengths) for layer in layers)

    profile.block_seconds = blocks
    profile.run_micro_batch = timed
    profile.seconds_between = lambda marks, subject: marks
    rates = {"ring_bytes_per_second": 1e12, "node_bytes_per_second": 2.5e11}
    args = argparse.Namespace(flags=flags, max_tokens=96, repeats=1, cpu=True, **rates)
    with contextlib.redirect_stdout(io.StringIO()):
        cost, found, _ = command.profile_model(args, on_cpu=True)
    return cost, [one.error for one in found]


def check_made_up_cost(cost: ModelCost, errors: list[float]) -> None:
    for direction in ("forward", "backward"):
        found, true = getattr(cost, direction), LAYER[direction]
        assert (found.a, found.b, found.g) == pytest.approx((true.a, true.b, true.g), rel=1e-6)
        assert getattr(cost, f"head_{direction}") == pytest.approx(HEAD[direction], rel=1e-5)
    assert max(map(abs, errors)) < 1e-9


@pytest.mark.full
def test_a_training_command_is_profiled_as_it_is() -> None:
    cost, errors = run_ranks(profile_with_made_up_clock, 1, [*MODEL, *TRAINING], True)[0]
    check_made_up_cost(cost, errors)
    shape = cost.shape
    assert (shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads) == (8, 32, 4, 2)
    assert (shape.head_dim, shape.ffn_hidden, shape.gated, shape.vocab) == (8, 48, True, 128)
    assert (cost.dtype, cost.tensor_parallel, cost.collective, cost.latency) == ("float32", 1, 0.0, 0.0)
    assert cost.device.startswith("CPU")
    # keys and values of two heads of 8 numbers, 4 bytes each, at the given 1 TB/s; their gradients go too
    assert cost.forward.c == pytest.approx(2 * 2 * 8 * 4 / 1e12)
    assert cost.backward.c == pytest.approx(2 * cost.forward.c)
    assert [cost.forward.h, cost.backward.h] == pytest.approx([RING["forward"], RING["backward"]])
    assert [cost.forward.m, cost.backward.m] == pytest.approx([BLOCK["forward"], BLOCK["backward"]])
    assert "22 micro-batches and the blocks of 3 rings on one rank" in cost.source
    assert cost.slowdown == 4
    assert "--ring-bytes-per-second, 1e+03 GB/s, between nodes 250 GB/s" in cost.source
    assert "kernel" in cost.source


@pytest.mark.full
def test_layers_of_experts_are_profiled_with_all_experts() -> None:
    """Costs are per layer, for any number of layers and any number of ranks that share them in training."""
    experts = (
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
        "--moe-latent-size 12"
    )
    flags = [*MODEL, *TRAINING, *experts.split(), "--expert-model-parallel-size", "8", "--moe-layer-freq", "[1]*8"]
    cost, errors = run_ranks(profile_with_made_up_clock, 1, flags, True)[0]
    check_made_up_cost(cost, errors)
    shape = cost.shape
    assert (shape.num_experts, shape.experts_per_token, shape.num_expert_layers) == (4, 2, 8)
    assert (shape.expert_ffn_hidden, shape.ffn_hidden, shape.expert_latent) == (48, 48, 12)
    with pytest.raises(ValueError, match="expert_latent is 12 there and 0 here"):
        check_same_model(cost, replace(shape, expert_latent=0), 1, "float32", "cost.json")
    deeper = replace(shape, num_layers=32, num_expert_layers=32)
    assert check_same_model(cost, deeper, 1, "float32", "cost.json") == replace(cost, shape=deeper)


def test_bytes_that_are_kept() -> None:
    cost, _ = run_ranks(profile_with_made_up_clock, 1, MODEL, False)[0]
    assert cost.recompute_bytes == 4 * 32  # the layer's input
    # 4 bytes each: norms, projections' inputs, query, key, value, output, both halves of the MLP, its product, ...
    assert 4 * (4 * 32 + 2 * 48) < cost.layer_bytes < 4 * 40 * 32
    selective = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    leaner, _ = run_ranks(profile_with_made_up_clock, 1, [*MODEL, *selective], False)[0]
    assert cost.recompute_bytes == leaner.recompute_bytes < leaner.layer_bytes < cost.layer_bytes
    assert "with selective recompute" in leaner.source


@pytest.mark.full
def test_a_profile_has_no_second_forward_pass_and_bf16() -> None:
    """Every plan adds the second forward pass of full recompute itself."""
    flags = [*MODEL, "--bf16", "--recompute-granularity", "full", "--recompute-method", "block",
             "--recompute-num-layers", "1"]  # fmt: skip
    cost, _ = run_ranks(profile_with_made_up_clock, 1, flags, True)[0]
    assert cost.dtype == "bfloat16"
    assert "recompute" not in cost.source
    assert cost.recompute_bytes == 2 * 32 < cost.layer_bytes  # the second is the same as without
    assert cost.backward.c == pytest.approx(3 * cost.forward.c)  # gradients travel in float32


@pytest.mark.full
def test_hdp_ranks_profile_together_and_measure_their_rings() -> None:
    found = run_ranks(profile_with_made_up_clock, 3, [*MODEL, *TRAINING], True)
    cost, errors = found[0]
    check_made_up_cost(cost, errors)
    assert [other for other, _ in found] == [cost] * 3
    assert cost.forward.h == pytest.approx(RING["forward"])
    assert cost.backward.h == pytest.approx(RING["backward"])
    assert [cost.forward.m, cost.backward.m] == pytest.approx([BLOCK["forward"], BLOCK["backward"]])
    assert len(errors) == 12 + 6
    assert "22 micro-batches and 8 rings of up to 96 tokens" in cost.source
    assert cost.collective > 0, "as tensor-parallel ranks would exchange"
    assert cost.latency > 0


@pytest.mark.full
def test_tensor_parallel_hdp_ranks() -> None:
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    found = run_ranks(profile_with_made_up_clock, 4, flags, True)
    cost, errors = found[0]
    check_made_up_cost(cost, errors)
    assert [other for other, _ in found] == [cost] * 4
    assert (cost.tensor_parallel, cost.shape.num_heads, cost.shape.vocab) == (2, 4, 256)
    assert cost.forward.c == pytest.approx(2 * 1 * 8 * 4 / 1e12)
    assert cost.forward.h == pytest.approx(RING["forward"])
    assert cost.collective > 0


def test_real_rings() -> None:
    first, second = run_ranks(real_rings, 2)
    assert first == second
    assert len(first) == 4
    assert [(timing.num_layers, timing.lengths, timing.width) for timing in first] == [
        (1, (64,), 2), (1, (24, 7), 2), (3, (64,), 2), (3, (24, 7), 2),
    ]  # fmt: skip
    assert all(timing.forward_seconds > 0 and timing.backward_seconds > 0 for timing in first)


def real_rings(rank: int, world: int) -> list[Timing]:
    from megatron.bytescale.training.profile import prepare, time_packs

    with contextlib.redirect_stdout(io.StringIO()):
        subject = prepare(MODEL, 64, on_cpu=True)
        timings = time_packs(subject, [], 2, [((64,), 2), ((24, 7), 2)])
    assert subject.runtime.parts.comm.stats.bytes_sent > 0
    assert subject.runtime.step.batch is None
    return timings


def test_busy_or_wall_time() -> None:
    busy, asked, tensor_parallel = run_ranks(seconds_of_marks, 1, init_group=False)[0]
    assert busy == (2.0, 4.0)
    assert asked == tensor_parallel == (20.0, 40.0)


def seconds_of_marks(rank: int, world: int) -> list[tuple[float, float]]:
    from types import SimpleNamespace

    import torch

    from bytescale_ext.measure.metrics import Mark
    from megatron.bytescale.training.profile import Subject, seconds_between

    torch.set_num_threads(1)
    marks = [Mark("", None, 10.0 * t, 1.0 * t, None) for t in (0, 1, 3, 7)]
    runtime, shape = runtime_of(), SimpleNamespace()
    make: Any = Subject
    one, two = (make(SimpleNamespace(tensor_model_parallel_size=size), runtime, shape) for size in (1, 2))
    subjects = [one, one, two]
    return [seconds_between(marks, subject, by_wall=number == 1) for number, subject in enumerate(subjects)]


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
        ("--tensor-model-parallel-size 2", "2 processes, or a multiple, and there are 1: torchrun --nproc-per-node 2"),
        ("--num-experts 4 --moe-layer-freq 2", "--moe-layer-freq: layers differ in their cost; profile with 1"),
        ("--num-experts 4 --moe-layer-freq [0,1,1,1,1,1,1,1]", "--moe-layer-freq: layers differ in their cost"),
        ("--attention-dropout 0.1", "--attention-dropout > 0"),
        ("--hdp-attention-kernel none", "none"),
        ("--num-query-groups 3", "--num-query-groups: make it a divisor"),
    ],
)
def test_what_cannot_be_profiled_is_refused(flags: str, said: str) -> None:
    message = run_ranks(refusal, 1, [*MODEL, *flags.split()], init_group=False)[0]
    assert said in message
    assert "\n" not in message


def test_every_rank_has_its_own_copy_of_the_packs_and_a_share_of_each_ring() -> None:
    plan = run_ranks(plan_of_packs, 1, init_group=False)[0]
    check_step_plan(plan)
    assert plan.lengths == (24, 9, 7, 7, *(5, 3) * 4, *(8,) * 4)
    assert plan.ranks[1][2].shards == (Shard(6, ((0, 5),), (1,)), Shard(7, ((0, 3),), (1,)))
    assert [[shard.ring for shard in one.shards] for one in plan.ranks[3]] == [
        [(0, 1, 2, 3)] * 2, [(2, 3)], [(3,), (3,)], [(3,)]
    ]  # fmt: skip


def plan_of_packs(rank: int, world: int) -> Any:
    from bytescale_ext.plan.step.sizes import Cluster
    from megatron.bytescale.training.profile import profile_plan

    return profile_plan([(5, 3), (8,)], [((24, 9), 4), ((7,), 2)], Cluster(4, 16))
