"""Flags of Seq1F1B: what is refused by name, what is switched on, and the configuration that comes of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.config import HdpConfig
from bytescale_ext.pipeline.config import SliceConfig
from bytescale_ext.plan.activation import key_value_bytes, layer_tensors
from bytescale_ext.plan.cost import LLAMA_7B, flops_stage_cost
from bytescale_ext.plan.document_slices import affordable_tokens
from megatron.bytescale.training.seq1f1b import REFUSALS, document_slice_rule, kept_note, one_stage_note
from tests.bytescale.test_arguments import EXAMPLES as HDP_EXAMPLES
from tests.e2e.training import MODEL, TRAIN
from tests.harness import preload, run_ranks

DOCUMENTS = HdpConfig(64, 1, 256, 4, "pp", num_stages=4, num_slices=4)
COMMON = [*MODEL, *TRAIN, "--mock-data", "--micro-batch-size", "1", "--cpu"]
SLICES = ["--seq1f1b-splits", "4"]
EXAMPLES = {row.flag: HDP_EXAMPLES[row.flag] for row in REFUSALS if row.flag in HDP_EXAMPLES} | {
    "--num-experts": "--num-experts 4",
    "--delay-wgrad-compute": "--delay-wgrad-compute",
    "--overlap-p2p-communication-warmup-flush": "--overlap-p2p-communication-warmup-flush",
}


def settle(rank: int, world: int, lines: Sequence[tuple[int, list[str]]]) -> list[Any]:
    """For each (processes, words): the configuration and some settled arguments, or the error."""
    return [settle_one(num_processes, words) for num_processes, words in lines]


def settle_one(num_processes: int, words: list[str]) -> Any:
    from megatron.training.arguments import parse_args, validate_args

    from megatron.bytescale.runtime import model_shape
    from megatron.bytescale.training import arguments, seq1f1b

    os.environ["WORLD_SIZE"] = str(num_processes)
    sys.argv = ["pretrain_gpt_hdp.py", *words]
    try:
        args = parse_args(arguments.add_arguments)
        arguments.set_device_defaults(args, sys.argv, on_cpu=True)
        seq1f1b.set_defaults(args)
        validate_args(args)
        args.padded_vocab_size = 128
        config = seq1f1b.slice_config(args, model_shape(args)) if seq1f1b.is_on(args) else None
        return config, args.create_attention_mask_in_dataloader, args.overlap_p2p_comm
    except ValueError as error:
        return str(error)
    except SystemExit:
        return "argparse refuses it"


@pytest.mark.parametrize(
    ("changes", "keeps_all"),
    [
        ({}, True),
        ({"recompute_granularity": "full"}, False),
        ({"activation_policy": "memo"}, False),
        ({"swap_fraction": 0.0}, False),
        ({"tensor_model_parallel_size": 2}, True),
    ],
)
def test_default_length_of_kept_keys(changes: dict[str, Any], keeps_all: bool) -> None:
    """Under recomputation and policies a token surely keeps its layer's input alone, so hardly any key is free."""
    values = {"seq1f1b_partition": None, "seq1f1b_cost": None, "recompute_granularity": None, "swap_fraction": None,
              "activation_policy": "none", "recompute_fraction": None, "tensor_model_parallel_size": 1,
              "virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_size": 4}  # fmt: skip
    args = argparse.Namespace(**values | changes)
    rule = document_slice_rule(args, DOCUMENTS, flops_stage_cost(LLAMA_7B, 4), LLAMA_7B)
    whole = sum(tensor.bytes_per_token for tensor in layer_tensors(LLAMA_7B))
    most = affordable_tokens(4, 4, 64, whole, key_value_bytes(LLAMA_7B))
    assert most > 500
    assert rule.kept_tokens >= most if keeps_all else rule.kept_tokens == affordable_tokens(4, 4, 64, 8192, 4096)
    given = document_slice_rule(args, replace(DOCUMENTS, kept_keys=7), flops_stage_cost(LLAMA_7B, 4), LLAMA_7B)
    assert given.kept_tokens == 7


def test_the_user_is_told_what_keeping_all_keys_takes() -> None:
    """4 stages of 8 layers; keys of 3 micro-batches in flight and float32 gradients of one."""
    args = argparse.Namespace(tensor_model_parallel_size=1, num_layers=32)
    key_bytes = key_value_bytes(LLAMA_7B)
    note = kept_note(args, DOCUMENTS, 100, LLAMA_7B)
    longest = DOCUMENTS.longest_sequence
    assert "up to 100 tokens are kept" in note and f"--hdp-kept-keys {longest} none does" in note
    assert f"up to {8 * 5 * longest * key_bytes / 1e9:,.1f} GB" in note
    assert kept_note(args, DOCUMENTS, longest, LLAMA_7B).endswith("are kept from slice to slice")


def settled(num_processes: int, *words: object) -> Any:
    preload("tests.e2e.preload")
    line = (num_processes, [str(word) for word in (*COMMON, *words)])
    return run_ranks(settle, 1, [line], init_group=False)[0][0]


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    """What is answered to the example of each row, in one process for all."""
    preload("tests.e2e.preload")
    lines = [(4, [*COMMON, *SLICES, *words.split()]) for words in EXAMPLES.values()]
    return dict(zip(EXAMPLES, run_ranks(settle, 1, lines, init_group=False)[0], strict=True))


def test_each_row_has_an_example() -> None:
    assert sorted(refusal.flag for refusal in REFUSALS) == sorted(EXAMPLES)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.flag)
def test_conflicting_flag_is_refused_by_name(row: Any, refused: dict[str, str]) -> None:
    assert refused[row.flag] == f"--seq1f1b-splits does not work with {row.flag}: {row.instead}"


def test_without_those_flags_the_line_is_accepted() -> None:
    words = ["--pipeline-model-parallel-size", 4, "--num-layers", 4, "--global-batch-size", 8]
    config, makes_mask, _ = settled(4, *words, *SLICES, "--seq1f1b-partition", "even")
    assert config == SliceConfig((64, 64, 64, 64), 4)
    assert makes_mask is False
    config, _, _ = settled(4, *words, *SLICES)
    assert sum(config.lengths) == 256 and config.lengths[0] > config.lengths[-1]


def test_virtual_stages_and_row_shares() -> None:
    words = ["--pipeline-model-parallel-size", 4, "--num-layers", 8, "--global-batch-size", 8]
    words += ["--num-virtual-stages-per-pipeline-rank", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel"]
    config, _, overlaps = settled(8, *words, *SLICES)
    assert (config.num_stages, config.num_chunks, config.row_shares, config.group_size) == (4, 2, 2, 4)
    assert all(length % 2 == 0 for length in config.lengths)
    assert overlaps is False


def test_one_slice_leaves_megatron_alone() -> None:
    config, makes_mask, _ = settled(1)
    assert config is None and makes_mask is True
    assert settled(1, "--seq1f1b-splits", 1)[0] is None
    assert settled(1, "--seq1f1b-splits", 1, "--seq1f1b-partition", "even")[0] == SliceConfig((256,), 1)


BAD = (
    (1, "--seq1f1b-splits 0", "--seq1f1b-splits 0 must be at least 1"),
    (1, "--seq1f1b-partition even", "--seq1f1b-partition needs --seq1f1b-splits"),
    (1, "--seq1f1b-cost x.json", "--seq1f1b-cost needs --seq1f1b-splits"),
    (1, "--seq1f1b-eager", "--seq1f1b-eager needs --seq1f1b-splits"),
    (1, "--seq1f1b-splits 1 --seq1f1b-eager", "--seq1f1b-eager needs --seq1f1b-splits of 2 or more"),
    (1, "--seq1f1b-splits 2 --seq1f1b-eager", "--seq1f1b-eager needs a --pipeline-model-parallel-size of 2 or more"),
    (4, "--seq1f1b-splits 2 --seq1f1b-eager --pipeline-model-parallel-size 4 --num-layers 8 "
        "--num-virtual-stages-per-pipeline-rank 2", "--seq1f1b-eager does not work with virtual stages"),
    (1, "--seq1f1b-splits 2 --seq1f1b-partition even --seq1f1b-cost x.json", "has no effect on"),
    (1, "--seq1f1b-splits 2 --seq1f1b-cost no-such-file.json", "no-such-file.json"),
    (1, "--seq1f1b-splits 257", "the most that can be is 256"),
    (1, "--seq1f1b-splits 2 --seq1f1b-partition 200,55", "of 256 tokens together; the nearest that fit are 201,55"),
    (1, "--seq1f1b-splits 2 --seq1f1b-partition odd", "partition 'odd': give time, flops, even"),
    (2, "--seq1f1b-splits 2 --seq1f1b-partition 129,127 --tensor-model-parallel-size 2 --sequence-parallel",
     "each a multiple of 2; the nearest that fit are 130,126"),
    (3, "--seq1f1b-splits 2 --pipeline-model-parallel-size 3 --num-layers 6 --num-virtual-stages-per-pipeline-rank 2 "
     "--global-batch-size 3", "the nearest numbers of micro-batches are 2 or 4"),
    (2, "--seq1f1b-splits 2 --pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
     "needs --pipeline-model-parallel-size 3 or more, not 2|Pipeline-model-parallel-size|greater than 2"),
    (4, "--seq1f1b-splits 2 --pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
     "--eval-iters 1 --eval-global-batch-size 1", "1 micro-batches of 2 slices leave a group"),
)  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    preload("tests.e2e.preload")
    lines = [(num_processes, [*COMMON, *words.split()]) for num_processes, words, _ in BAD]
    return run_ranks(settle_or_assert, 1, lines, init_group=False)[0]


def settle_or_assert(rank: int, world: int, lines: Sequence[tuple[int, list[str]]]) -> list[Any]:
    """As ``settle``; what Megatron itself refuses with an assertion is its text, as ``parse`` would give it."""
    found = []
    for num_processes, words in lines:
        try:
            found.append(settle_one(num_processes, words))
        except AssertionError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_values_are_refused_with_the_nearest(index: int, answers: list[Any]) -> None:
    assert isinstance(answers[index], str), answers[index]
    assert any(part in answers[index] for part in BAD[index][2].split("|")), answers[index]


def test_one_stage_is_told_what_slices_do_there() -> None:
    assert one_stage_note(2) is None
    assert "--recompute-granularity full" in str(one_stage_note(1))
