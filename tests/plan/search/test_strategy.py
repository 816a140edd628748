from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.plan.search.strategy import (
    ACTIVATIONS,
    BLOCK,
    FULL,
    KEEP,
    PRICED,
    Strategy,
    parse_strategy,
)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Return a random strategy with complete flags: features that need a budget have one."""
    layers = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    chunks = draw(st.integers(1, 3)) if len(layers) > 1 and len(set(layers)) == 1 else 1
    slices = chunks == 1 and len(layers) > 1 and draw(st.booleans())
    activations = draw(st.sampled_from(ACTIVATIONS))
    budget = st.integers(1, 99_999).map(lambda number: number / 100)
    needs = slices or activations == PRICED
    return Strategy(
        tensor_parallel=1 << draw(st.integers(0, 3)),
        stage_layers=layers,
        tokens_per_rank=draw(st.integers(1, 1 << 20)),
        chunks=chunks,
        shares_optimizer=draw(st.booleans()),
        chooses_slices=slices,
        activations=activations,
        loss_tokens=draw(st.none() | st.integers(1, 1 << 16)),
        device_gb=draw(budget) if needs else None,
        host_gb=draw(budget) if needs else 0.0,
        expert_parallel=draw(st.integers(1, 8)),
        recomputed_layers=draw(st.integers(1, 9)) if activations == BLOCK else 0,
    )


@given(strategies())
def test_flags_parse_back(strategy: Strategy) -> None:
    flags = strategy.flags()
    assert parse_strategy(flags, sum(strategy.stage_layers)) == strategy
    others = ["--num-layers", "12", *flags, "--bf16", "--lr", "1e-4"]
    assert parse_strategy(others, sum(strategy.stage_layers)) == strategy


def test_flags_of_a_strategy() -> None:
    strategy = Strategy(2, (3, 3, 2), 8192, shares_optimizer=True, chooses_slices=True, device_gb=40.25)
    assert " ".join(strategy.flags()) == (
        "--hybrid-data-parallel --hdp-tokens-per-rank 8192 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et*3|t*3|t*2L --overlap-grad-reduce "
        "--use-distributed-optimizer --overlap-param-gather --seq1f1b-slices auto --device-memory-gb 40.25"
    )
    assert str(strategy) == "tp 2, pp 3 (3+3+2), C 8192, slices"
    assert strategy.model_ranks == 6


def test_full_recompute_and_policies() -> None:
    full = Strategy(1, (4,), 1024, activations=FULL, loss_tokens=512)
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in " ".join(full.flags())
    assert str(full) == "tp 1, pp 1, C 1024, full recompute, chunked loss, no ZeRO-1"
    block = Strategy(1, (4,), 1024, shares_optimizer=True, activations=BLOCK, recomputed_layers=3)
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers 3" in " ".join(block.flags())
    assert str(block) == "tp 1, pp 1, C 1024, 3 recomputed layers"
    priced = Strategy(1, (4,), 1024, activations=PRICED, device_gb=3.0)
    assert priced.flags()[-6:] == ["--activation-policy", "priced", "--device-memory-gb", "3", "--host-memory-gb", "0"]
    sliced = Strategy(1, (4, 4), 1024, chooses_slices=True, activations=PRICED, device_gb=3.0)
    assert str(sliced) == "tp 1, pp 2, C 1024, slices, priced activations, no ZeRO-1"
    assert "--seq1f1b-slices auto --activation-policy priced --device-memory-gb 3" in " ".join(sliced.flags())
    assert Strategy(1, (4, 4), 1024, chunks=2).activations == KEEP
    experts = Strategy(1, (4,), 1024, shares_optimizer=True, expert_parallel=4)
    assert "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 4" in " ".join(experts.flags())
    assert str(experts) == "tp 1, pp 1, C 1024, ep 4"


def test_flags_that_are_no_strategy() -> None:
    with pytest.raises(ValueError, match="no --hdp-tokens-per-rank"):
        parse_strategy(["--tensor-model-parallel-size", "2"], 4)
    with pytest.raises(ValueError, match="--hdp-tokens-per-rank"):
        parse_strategy(["--hdp-tokens-per-rank", "many"], 4)
    with pytest.raises(ValueError, match="--activation-policy memo"):
        parse_strategy(["--hdp-tokens-per-rank", "8", "--activation-policy", "memo"], 4)
