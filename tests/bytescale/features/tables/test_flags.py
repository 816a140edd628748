"""Flags of tables: resolved values, and refusals before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from bytescale_ext.config.memory.tables import EmbeddingConfig, HostTables, NgramConfig, TablesConfig
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings
from megatron.bytescale import features
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.features.tables import flags
from megatron.bytescale.features.tables.flags import REFUSALS, TABLES
from tests.bytescale.features.activations.test_flags import parsed
from tests.config.runs import run_of

LAYERS = ("--ngram-layers", "2,5")
HOST = ("--host-tables", "ngram")
BOTH = (*LAYERS, "--host-tables", "ngram", "embedding")
EMBEDDING = ("--host-tables", "embedding")
NEEDED = {
    "fp16": False, "ckpt_format": "torch_dist", "async_save": False, "use_gloo_process_groups": True,
    "untie_embeddings_and_output_weights": True, "mtp_num_layers": None,
}  # fmt: skip


def tables_of(*words: str, **settings: Any) -> TablesConfig:
    config = TABLES.resolve(TABLES.read(parsed(*words, **{"seed": 7, **settings})), run_of())
    assert isinstance(config, TablesConfig)
    return config


def ngram_of(*words: str) -> NgramConfig:
    config = tables_of(*LAYERS, *words).ngram
    assert config is not None
    return config


def check(*words: str) -> None:
    TABLES.before_checks(TABLES.read(parsed(*words)))


def test_defaults() -> None:
    assert tables_of(*LAYERS) == TablesConfig(NgramConfig((2, 5), GramRule((2, 3), 4, 1 << 20), 64, 7))
    assert not TABLES.is_on(parsed())
    assert TABLES.is_on(parsed(*LAYERS))
    assert TABLES.is_on(parsed(*EMBEDDING))
    shape = run_of().shape
    host = HostTables(CacheSettings(shape.vocab // 10), 0.01, flags.FRESH_STEPS)
    assert tables_of(*EMBEDDING) == TablesConfig(None, EmbeddingConfig(host, shape.vocab, shape.hidden))


def test_sizes_of_ngram_tables() -> None:
    config = ngram_of(*"--ngram-orders 4,2 --ngram-heads 2 --ngram-rows 1000 --ngram-dim 8".split())
    assert config.rule == GramRule((2, 4), 2, 1000)
    assert config.num_parameters(10) == 1000 * 8 + 2 * 10 * (2 * 2) * 8


def test_all_tables_in_host_memory_share_one_cache_policy() -> None:
    words = "--ngram-rows 1000 --table-cache-rows 0.25 --table-cache-policy lfu --table-staleness 3,4,7 --table-lr 0.5"
    tables, vocab = tables_of(*BOTH, *words.split()), run_of().shape.vocab
    assert tables.ngram is not None
    assert tables.embedding is not None
    assert tables.ngram.host == HostTables(CacheSettings(250, "lfu", 3, 4), 0.5, 7)
    assert tables.embedding.host == HostTables(CacheSettings(vocab // 4, "lfu", 3, 4), 0.5, 7)
    assert tables.ngram.num_parameters(10) == 2 * 10 * 8 * 64


def test_warm_up_may_be_left_out() -> None:
    host = ngram_of(*HOST, "--table-staleness", "3,4").host
    assert host == HostTables(CacheSettings((1 << 20) // 10, "lru", 3, 4), 0.01, flags.FRESH_STEPS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ngram-layers", "9"], "--ngram-layers 9: the model has layers 1 to 8"),
        ([*LAYERS, "--ngram-orders", "2,9000"], "--ngram-orders 9000: no sample is longer than --seq-length 8192"),
        ([*LAYERS, "--ngram-heads", "0"], "--ngram-heads 0 must be at least 1"),
        ([*EMBEDDING, "--table-cache-rows", "1.5"], "--table-cache-rows 1.5 is not a share from 0 to 1"),
        ([*EMBEDDING, "--table-lr", "0"], "--table-lr 0 must be positive"),
    ],
)
def test_bad_values(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tables_of(*words)


@pytest.mark.parametrize("text", ["3", "1,2,3,4", "-1,2", "1,x"])
def test_bad_staleness(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*EMBEDDING, f"--table-staleness={text}")
    assert f"--table-staleness: '{text}' is not R,W or R,W,STEPS in whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*LAYERS, "--table-cache-rows", "0.5"], "--table-cache-rows needs --host-tables"),
        ([*LAYERS, "--table-staleness", "1,1"], "--table-staleness needs --host-tables"),
        ([*EMBEDDING, "--ngram-rows", "5"], "--ngram-rows needs --ngram-layers"),
        ([*HOST], "--host-tables ngram needs --ngram-layers"),
    ],
)
def test_flags_of_tables_that_a_run_does_not_have(words: list[str], message: str) -> None:
    check(*BOTH, "--table-cache-rows", "0.5", "--ngram-rows", "5")
    with pytest.raises(ValueError, match=f"^{message}$"):
        check(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table-lr", "0.5"], "--table-lr needs --ngram-layers or --host-tables"),
        ([*LAYERS], "--ngram-layers needs --hybrid-data-parallel"),
        ([*EMBEDDING], "--host-tables needs --hybrid-data-parallel"),
    ],
)
def test_messages_name_the_flag_that_was_given(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?m)^{message}$"):
        features.check(parsed(*words))


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (
            LAYERS,
            {"hdp_loader": "ray"},
            "--ngram-layers does not work with --hdp-loader ray .*: use --hdp-loader local",
        ),
        (LAYERS, {"sculpt_windows": ["a"], "sculpt_attention": "window"}, "add --sculpt-attention document"),
        (LAYERS, {"draft_heads": "clover"}, "--draft-heads: train heads of models without n-gram memory"),
        (LAYERS, {"memory_plan": "plan.json"}, "--memory-plan: remove it: the plan has no place for rows"),
        (BOTH, {"fp16": True}, "use --bf16: with a loss scale steps may be skipped"),
        (EMBEDDING, {"fp16": True}, "--host-tables does not work with --fp16 under --host-tables: use --bf16"),
        (EMBEDDING, {"ckpt_format": "torch"}, "use torch_dist, which saves the rows of each rank"),
        (EMBEDDING, {"async_save": True}, "tables change while they would be saved"),
        (EMBEDDING, {"use_gloo_process_groups": False, "fake_process_group": False}, "hosts exchange rows over gloo"),
        (EMBEDDING, {"untie_embeddings_and_output_weights": False}, "add --untie-embeddings-and-output-weights"),
        (EMBEDDING, {"mtp_num_layers": 1}, "--mtp-num-layers under --host-tables embedding: remove it"),
        (EMBEDDING, {"draft_heads": "clover"}, "--draft-heads"),
    ],
)
def test_refused(words: tuple[str, ...], settings: dict[str, Any], message: str) -> None:
    def refuse_in(**changes: Any) -> None:
        args = parsed(*words, **{**NEEDED, **changes})
        refuse_conflicts(args, {"tables": TABLES.switch(args)}, list(REFUSALS))

    refuse_in()
    with pytest.raises(ValueError, match=message):
        refuse_in(**settings)


def test_what_is_accepted() -> None:
    """Windows with separate documents are refused, and settings that only tables in host memory refuse."""
    for settings in ({"sculpt_windows": ["a"], "sculpt_attention": "document"}, {"fp16": True}, {"mtp_num_layers": 1}):
        args = parsed(*LAYERS, **{**NEEDED, **settings})
        refuse_conflicts(args, {"tables": TABLES.flag}, list(REFUSALS))


def test_tables_that_do_not_fit_name_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "free_host_bytes", lambda: 1_000_000)
    words = [*LAYERS, *HOST, "--ngram-rows", "10000", "--ngram-dim", "8"]
    tables_of(*words, "--table-cache-rows", "0")
    message = r"take 0\.00\d+ GB of each process's host memory, but there are 0\.001 GB: lower --table-cache-rows"
    with pytest.raises(ValueError, match=f"{message}, --ngram-rows or --ngram-dim, or use more ranks"):
        tables_of(*words, "--table-cache-rows", "1")
    monkeypatch.setattr(flags, "free_host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="lower --table-cache-rows, or use more ranks"):
        tables_of(*EMBEDDING)


def test_the_budget_of_tables_is_what_activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "free_host_bytes", lambda: 5e9)
    assert flags.free_bytes_of_process(parsed(host_memory_gb=None)) == 5e9
    assert flags.free_bytes_of_process(parsed(host_memory_gb=2.0)) == 3e9
    assert flags.free_bytes_of_process(parsed(host_memory_gb=9.0)) == 0
