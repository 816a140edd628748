"""Flags of Seq1F1B: enabled features, refusals, and the resulting slices."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bytescale_ext.config.slices import DocumentSliceConfig, SliceConfig
from bytescale_ext.plan.activation.tensors import layer_tensors
from bytescale_ext.plan.cost.model_shape import LLAMA_7B, key_value_bytes
from bytescale_ext.plan.schedule.document_slices import SliceRule, affordable_tokens
from bytescale_ext.plan.setup.memory import stage_state_bytes
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.setup import setup_of
from megatron.bytescale.features.slices import zero_bubble
from megatron.bytescale.features.slices.flags import SliceFlags, add_arguments, flags_of, kept_note, slice_options
from tests.bytescale.arguments.resolving import check_refused, resolved
from tests.bytescale.features.activations.test_flags import SHAPE, parsed
from tests.config.runs import hdp_of
from tests.e2e.training import MODEL, TRAIN

DOCUMENTS = hdp_of(balance="pp", num_stages=4)
COMMON = [*MODEL, *TRAIN, "--mock-data", "--micro-batch-size", "1", "--cpu"]
SLICES = ["--seq1f1b-slices", "4"]


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
    """Under recomputation and policies a token always keeps only its layer's input, so few keys fit for free."""
    stages = {"pipeline_model_parallel_size": 4, "world_size": 16 * changes.get("tensor_model_parallel_size", 1)}
    sizes = {"hybrid_data_parallel": True, "hdp_tokens_per_rank": 64, "seq_length": 256, "seq1f1b_slices": 4}
    host = {"host_memory_gb": 1.0} if changes.keys() & {"activation_policy", "swap_fraction"} else {}
    settings = {**stages, **sizes, **host, **changes}
    setup = setup_of(parsed(**settings))
    tensors = layer_tensors(SHAPE)
    whole, least = sum(tensor.bytes_per_token for tensor in tensors), tensors[0].bytes_per_token
    keys = key_value_bytes(SHAPE)
    most, fewest = (affordable_tokens(4, Slicing(4), 64, each, keys) for each in (whole, least))
    assert most > fewest
    kept = setup.given_slicing.kept_tokens
    assert kept >= most if keeps_all else kept == fewest
    assert setup_of(parsed(**settings, hdp_kept_keys=7)).given_slicing.kept_tokens == 7


def test_flags_and_slices_follow_from_each_other() -> None:
    for slicing in (Slicing(3), Slicing(2).in_eager_order(), Slicing(1, zero_bubble=True)):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        zero_bubble.add_arguments(parser)
        args = parser.parse_args(flags_of(slicing))
        args.hybrid_data_parallel, args.device_memory_gb, args.host_memory_gb = False, None, None
        assert slice_options(options_of(args, SliceFlags)).slicing == slicing


def test_the_user_is_told_what_keeping_all_keys_takes() -> None:
    """With 7 + 8 + 8 + 9 layers, stage 1 has the peak: keys of 6/4 micro-batches and float32 gradients of 3/4."""
    longest, key_bytes = DOCUMENTS.longest_sequence, key_value_bytes(LLAMA_7B)
    some, everything = (DocumentSliceConfig(SliceRule(Slicing(4, kept)), 4) for kept in (100, longest))
    stages = [layers * key_bytes for layers in (7, 8, 8, 9)]
    note = kept_note(some, longest, stages)
    assert "up to 100 tokens are kept" in note
    assert f"--hdp-kept-keys {longest} avoids that" in note
    assert f"up to {8 * (6 / 4 + 6 / 4) * longest * key_bytes / 1e9:,.1f} GB" in note
    assert kept_note(everything, longest, stages).endswith("are kept from slice to slice")
    in_host = DocumentSliceConfig(SliceRule(Slicing(4, 100, swapped_tokens=longest)), 4)
    assert kept_note(in_host, longest, stages).endswith(f"slice to slice, and up to {longest:,} tokens in host memory")


@pytest.mark.ranks
def test_lengths_of_slices() -> None:
    words = [*COMMON, "--pipeline-model-parallel-size", 4, "--num-layers", 4, "--global-batch-size", 8, *SLICES]
    even = resolved(4, *words, "--seq1f1b-partition", "even")
    assert even.features == {"slices": SliceConfig(Slicing(4), (64, 64, 64, 64), 4)}
    assert even.args["create_attention_mask_in_dataloader"] is False
    lengths = resolved(4, *words).features["slices"].lengths
    assert sum(lengths) == 256
    assert lengths[0] > lengths[-1]


@pytest.mark.ranks
def test_virtual_stages_and_row_shares() -> None:
    words = ["--pipeline-model-parallel-size", 4, "--num-layers", 8, "--global-batch-size", 8]
    words += ["--num-virtual-stages-per-pipeline-rank", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel"]
    found = resolved(8, *COMMON, *words, *SLICES)
    config = found.features["slices"]
    assert (config.num_stages, config.num_chunks, config.row_shares, config.group_size) == (4, 2, 2, 4)
    assert all(length % 2 == 0 for length in config.lengths)
    assert (found.args["overlap_p2p_comm"], found.args["overlap_p2p_comm_warmup_flush"]) == (True, True)
    in_line = resolved(8, *COMMON, *words, *SLICES, "--no-overlap-p2p-communication").args
    assert (in_line["overlap_p2p_comm"], in_line["overlap_p2p_comm_warmup_flush"]) == (False, False)


@pytest.mark.ranks
def test_one_slice_leaves_megatron_alone() -> None:
    for words in ([], ["--seq1f1b-slices", 1]):
        found = resolved(1, *COMMON, *words)
        assert found.features == {}
        assert found.args["create_attention_mask_in_dataloader"] is True


BAD = (
    (1, "--seq1f1b-slices 0", "--seq1f1b-slices 0 must be at least 1"),
    (1, "--seq1f1b-partition even", "--seq1f1b-partition needs --seq1f1b-slices of 2 or more"),
    (1, "--seq1f1b-slices 1 --seq1f1b-eager", "--seq1f1b-eager needs --seq1f1b-slices of 2 or more"),
    (1, "--seq1f1b-slices 2 --seq1f1b-eager", "--seq1f1b-eager needs a --pipeline-model-parallel-size of 2 or more"),
    (4, "--seq1f1b-slices 2 --seq1f1b-eager --pipeline-model-parallel-size 4 --num-layers 8 "
        "--num-virtual-stages-per-pipeline-rank 2", "--seq1f1b-eager does not work with virtual stages"),
    (1, "--seq1f1b-slices auto", "--seq1f1b-slices auto needs --hybrid-data-parallel"),
    (1, "--seq1f1b-slices 2 --device-memory-gb 1", "--device-memory-gb needs --activation-policy"),
    (1, "--seq1f1b-slices 257", "use at most 256 slices"),
    (1, "--seq1f1b-slices 2 --seq1f1b-partition 200,55", "in total; the nearest lengths that fit are 201,55"),
    (1, "--seq1f1b-slices 2 --seq1f1b-partition odd", "--seq1f1b-partition 'odd': give time, flops, even"),
    (2, "--seq1f1b-slices 2 --seq1f1b-partition 129,127 --tensor-model-parallel-size 2 --sequence-parallel",
     "each a multiple of 2; the nearest lengths that fit are 130,126"),
    (3, "--seq1f1b-slices 2 --pipeline-model-parallel-size 3 --num-layers 6 --num-virtual-stages-per-pipeline-rank 2 "
     "--global-batch-size 3", "the nearest numbers of micro-batches are 2 or 4"),
    (2, "--seq1f1b-slices 2 --pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 "
     "--no-overlap-p2p-communication", "need --pipeline-model-parallel-size 3 or more"),
    (4, "--seq1f1b-slices 2 --pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
     "--eval-iters 1 --eval-global-batch-size 1", "1 micro-batches of 2 slices leave a group"),
)  # fmt: skip


BAD_CHOICES = (
    ("1e-9", "micro-batches of 256 tokens take at least"),
    ("-1", "--device-memory-gb -1 is not an amount of memory"),
    ("1 --hdp-kept-keys 9", "chooses the value of --hdp-kept-keys: remove --hdp-kept-keys"),
    ("1 --seq1f1b-eager", "chooses the value of --seq1f1b-eager: remove --seq1f1b-eager"),
    ("1e-6 --swap-fraction 0.5 --host-memory-gb 0.01", "GB of device memory, and --device-memory-gb is 1e-06"),
    ("1 --swap-fraction 0.5 --host-memory-gb 1e-6", "GB of host memory, and --host-memory-gb is 1e-06"),
    ("0.001 --num-experts 4 --moe-ffn-hidden-size 4096", "take at least"),
    ("1 --pipeline-model-parallel-size 1", "--seq1f1b-slices auto needs a --pipeline-model-parallel-size of 2 or more"),
)


CHOSEN = "--hybrid-data-parallel --hdp-tokens-per-rank 256 --attention-dropout 0 --seq1f1b-slices auto " \
         "--pipeline-model-parallel-size 2 --num-layers 4 --device-memory-gb"  # fmt: skip


@pytest.mark.ranks
def test_the_planner_chooses_slices_within_the_budget() -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    whole, less = (resolved(2, *MODEL, *TRAIN, "--cpu", *f"{CHOSEN} 0.5 {words}".split()) for words in ("", recompute))
    choice = whole.decision.slices
    assert choice.device_bytes == 0.5e9
    assert choice.memory.state_bytes == stage_state_bytes(whole.decision.setup)
    config = whole.features["slices"]
    assert config.receives_ahead
    assert "fastest slices within 0.5 GB of device memory" in config.note
    assert less.decision.slices.memory.layer.activations < 0.5 * choice.memory.layer.activations


@pytest.mark.ranks
def test_bad_values_are_refused_with_the_nearest() -> None:
    given = [*MODEL, *TRAIN, "--cpu", *CHOSEN.split()]
    check_refused(
        *((num_processes, [*COMMON, *words.split()], message) for num_processes, words, message in BAD),
        *((2, [*given, *words.split()], message) for words, message in BAD_CHOICES),
        (2, given[:-1], "needs --device-memory-gb"),
    )
