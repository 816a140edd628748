"""Configurations of stock training: the settings that Megatron's own configuration functions leave out."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.training import HDP, MODEL, TRAIN
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

COMMON = [*MODEL, *TRAIN, "--micro-batch-size", "1", "--mock-data"]
ROPE = "--rotary-base 500000 --use-rope-scaling --kv-channels 16".split()
HEAD_DIM, NUM_POSITIONS = 16, 300


def build(words: list[str], with_documents: bool = False) -> Any:
    """Return the model that a command line trains, in the only process of a group."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.bytescale.arguments.parse import parse
    from megatron.bytescale.arguments.resolve import resolve
    from megatron.bytescale.core.models.gpt.gpt_layer_specs import document_layer_spec
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import stock_training

    sys.argv = ["pretrain_gpt_hdp.py", *words]
    args = parse(sys.argv, on_cpu=True)
    config = stock_training(args).model
    if with_documents:
        config.transformer_layer_spec = document_layer_spec(Runtime.of(resolve(args)))
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return config.get_builder_cls()(config).build_model(groups, pre_process=True, post_process=True)


def angles(rank: int, world: int, words: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the angles [positions, 1, 1, dim] of Megatron's samples and of documents."""
    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles

    rotary = build(words).rotary_pos_emb
    return rotary(NUM_POSITIONS), document_angles(rotary, torch.arange(NUM_POSITIONS))


def llama3_angles(base: float, factor: float) -> np.ndarray[Any, Any]:
    """Return the angles [positions, dim / 2] of Llama 3.1's scaled RoPE, as its authors define it.

    Wavelengths up to 2,048 tokens stay, wavelengths beyond 8,192 are scaled by the factor, and wavelengths in between
    are interpolated.
    """
    scaled = []
    for index in range(HEAD_DIM // 2):
        frequency = base ** (-2.0 * index / HEAD_DIM)
        share = (8192 * frequency / (2 * math.pi) - 1) / (4 - 1)
        share = min(1.0, max(0.0, share))
        scaled.append(share * frequency + (1 - share) * frequency / factor)
    return np.outer(np.arange(NUM_POSITIONS), scaled)


@pytest.mark.parametrize("factor", [None, 1.5, 4.0])
def test_rope_is_scaled_by_the_factor_that_was_given(factor: float | None) -> None:
    given = [] if factor is None else ["--rope-scaling-factor", str(factor)]
    (found,) = run_ranks(angles, 1, [*COMMON, *ROPE, *given])
    expected = llama3_angles(500000.0, 8.0 if factor is None else factor)
    assert np.abs(expected - llama3_angles(500000.0, 2.0)).max() > 1e-3  # otherwise the factor has no effect
    for one in found:
        halves = one[:, 0, 0].chunk(2, dim=-1)
        assert torch.equal(*halves)
        np.testing.assert_allclose(halves[0].numpy(), expected, rtol=1e-5, atol=1e-6)


def query_norms(rank: int, world: int, words: list[str], with_documents: bool) -> list[tuple[str, int]]:
    """Return (class, number of weights) of the norm of queries and keys in each layer."""
    layers = build(words, with_documents).decoder.layers
    norms = [norm for layer in layers for norm in (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm)]
    return [(type(norm).__name__, len(list(norm.parameters()))) for norm in norms]


@pytest.mark.parametrize("with_documents", [False, True], ids=["samples", "documents"])
def test_norms_of_queries_and_keys_are_those_that_were_asked_for(with_documents: bool) -> None:
    words = [*COMMON, "--num-experts", "2", "--qk-l2-norm"]
    assert run_ranks(query_norms, 1, words, with_documents)[0] == [("L2Norm", 0)] * 4
    words = [*COMMON, "--num-experts", "2", "--qk-layernorm"]
    assert run_ranks(query_norms, 1, words, with_documents)[0] == [("RMSNorm", 1)] * 4


def data_fields(rank: int, world: int, words: list[str]) -> dict[str, Any]:
    """Return the fields of the data set's configuration of a run of Megatron's samples, and its class."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.arguments.parse import parse
    from megatron.bytescale.training.stock import dataset_config

    sys.argv = ["pretrain_gpt_hdp.py", *words]
    parse(sys.argv, on_cpu=True)
    config = dataset_config()
    return {**vars(config), "tokenizer": None, "class": type(config).__name__}


SWITCHES = {
    "--full-validation": ("full_validation", True),
    "--multiple-validation-sets": ("multiple_validation_sets", True),
    "--reset-position-ids": ("reset_position_ids", True),
    "--reset-attention-mask": ("reset_attention_mask", True),
    "--eod-mask-loss": ("eod_mask_loss", True),
    "--no-create-attention-mask-in-dataloader": ("create_attention_mask", False),
    "--allow-ambiguous-pad-tokens": ("allow_ambiguous_pad_tokens", True),
    "--dataloader-fast-cache-load": ("fast_cache_load", True),
    "--dataloader-defer-npy-index-mmap": ("defer_npy_index_mmap", True),
    "--no-mmap-bin-files": ("mmap_bin_files", False),
}
VALUES = {
    "--object-storage-cache-path index": ("object_storage_cache_path", "index"),
    "--mid-level-dataset-surplus 0.25": ("mid_level_dataset_surplus", 0.25),
    "--num-dataset-builder-threads 3": ("num_dataset_builder_threads", 3),
    "--data-cache-path cache": ("path_to_cache", "cache"),
    "--seed 7": ("random_seed", 7),
    "--seq-length 128": ("sequence_length", 128),
}
FIM = {
    "--fim-rate 0.3": ("fim_rate", 0.3),
    "--fim-spm-rate 0.2": ("fim_spm_rate", 0.2),
    "--fim-split-sample x": ("fim_split_sample", "x"),
    "--fim-fragment-rate 0.1": ("fim_fragment_rate", 0.1),
    "--fim-no-prefix y": ("fim_no_prefix", "y"),
}


TOKENS = {
    "--fim-prefix-token": "<a>",
    "--fim-middle-token": "<b>",
    "--fim-suffix-token": "<c>",
    "--fim-pad-token": "<d>",
    "--fim-eod-token": "<e>",
}


def test_data_flags_reach_the_configuration_of_samples(tmp_path: Path) -> None:
    (tmp_path / "sequences.json").write_text('{"a": [1, 2]}')
    table = SWITCHES | VALUES
    split = TRAIN.index("--split")
    plain_words = [*MODEL, *TRAIN[:split], *TRAIN[split + 2 :], "--micro-batch-size", "1"]
    plain_words += "--train-data-path a --valid-data-path b --test-data-path c".split()
    words = [*plain_words, *" ".join(table).split()]
    words += ["--per-dataset-sequences-path", str(tmp_path / "sequences.json")]
    (found,) = run_ranks(data_fields, 1, words, init_group=False)
    expected = dict(table.values()) | {"sequences_per_dataset": {"a": [1, 2]}, "class": "GPTDatasetConfig"}
    assert {name: found[name] for name in expected} == expected
    (plain,) = run_ranks(data_fields, 1, plain_words, init_group=False)
    assert all(plain[name] != expected[name] for name, _ in table.values())


def test_flags_of_middles_reach_the_configuration_of_samples() -> None:
    words = [*MODEL, *TRAIN, "--micro-batch-size", "1", "--data-path", "unread", "--fim-data"]
    words += [*" ".join(FIM).split(), *" ".join(f"{flag} {token}" for flag, token in TOKENS.items()).split()]
    (found,) = run_ranks(data_fields, 1, words, init_group=False)
    tokens = {flag.split("-")[3]: token for flag, token in TOKENS.items()}
    expected = dict(FIM.values()) | {"fim_extra_tokens": tokens}
    assert {name: found[name] for name in expected} == expected
    assert found["class"] == "GPTFIMDatasetConfig"


def changed_fields(rank: int, world: int, words: list[str]) -> set[str]:
    """Return the fields of the model's configuration that training on documents sets."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.arguments.parse import parse
    from megatron.bytescale.arguments.resolve import resolve
    from megatron.bytescale.features.hdp.build import use_document_model
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import stock_training

    sys.argv = ["pretrain_gpt_hdp.py", *words]
    args = parse(sys.argv, on_cpu=True)
    plain, ours = stock_training(args).model, use_document_model(stock_training(args), Runtime.of(resolve(args))).model
    before, after = ({**vars(one), **vars(one.transformer), "transformer": None} for one in (plain, ours))
    names = {name for name in before if repr(before[name]) != repr(after[name])}
    return names | (before.keys() ^ after.keys())


def test_documents_change_the_spec_the_hooks_and_the_end_of_the_gradients_alone() -> None:
    words = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", "256", "--data-path", "unread"]
    assert run_ranks(changed_fields, 1, words, init_group=False)[0] == {
        "transformer_layer_spec",
        "pre_wrap_hooks",
        "post_wrap_hooks",
        "finalize_model_grads_func",
    }
