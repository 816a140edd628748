"""The flags of n-gram memory: what is resolved, and what is refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from bytescale_ext.config.memory.host_tables import HostTables
from bytescale_ext.config.memory.ngram import NgramConfig
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.features.tables import flags as host_tables
from megatron.bytescale.features.tables import ngram
from megatron.bytescale.features.tables.ngram import NGRAM, REFUSALS, resolve
from tests.bytescale.features.activations.test_flags import parsed
from tests.config.runs import run_of

LAYERS = ("--ngram-layers", "2,5")
HOST = ("--ngram-storage", "host")
ON_HOST = {
    "ngram_storage": "host", "fp16": False, "ckpt_format": "torch_dist", "async_save": False,
    "use_gloo_process_groups": True,
}  # fmt: skip


def config_of(*words: str, **settings: Any) -> NgramConfig:
    return resolve(NGRAM.read(parsed(*LAYERS, *words, **{"seed": 7, **settings})), run_of())


def test_defaults() -> None:
    assert config_of() == NgramConfig((2, 5), GramRule((2, 3), 4, 1 << 20), 64, 7)
    with pytest.raises(ValueError, match="--ngram-cache-rows needs --ngram-storage host"):
        ngram.before_checks(ngram.NGRAM.read(parsed(*LAYERS, "--ngram-cache-rows", "0.5")))


def test_what_is_given() -> None:
    words = "--ngram-orders 4,2 --ngram-heads 2 --ngram-rows 1000 --ngram-dim 8".split()
    config = config_of(*words)
    assert config.rule == GramRule((2, 4), 2, 1000)
    assert config.num_parameters(10) == 1000 * 8 + 2 * 10 * (2 * 2) * 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ngram-layers", "9"], "--ngram-layers 9: the model has layers 1 to 8"),
        (["--ngram-orders", "2,9000"], "--ngram-orders 9000: no sample is longer than --seq-length 8192"),
        (["--ngram-heads", "0"], "--ngram-heads 0 must be at least 1"),
        ([*HOST, "--ngram-cache-rows", "1.5"], "--ngram-cache-rows 1.5 is not a share from 0 to 1"),
        ([*HOST, "--ngram-staleness-read", "-1"], "--ngram-staleness-read -1 must be at least 0"),
        ([*HOST, "--ngram-lr", "0"], "--ngram-lr 0 must be positive"),
    ],
)
def test_bad_values(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hdp_loader": "ray"}, "--hdp-loader ray: use --hdp-loader local"),
        ({"sculpt_windows": ["a"], "sculpt_attention": "window"}, "add --sculpt-attention document"),
        ({"draft_heads": "clover"}, " --draft-heads: train heads of models without a memory"),
        ({**ON_HOST, "fp16": True}, "use --bf16: with a loss scale steps may be skipped"),
        ({**ON_HOST, "ckpt_format": "torch"}, "use torch_dist, which saves the rows of each rank"),
        ({**ON_HOST, "async_save": True}, "tables change while they would be saved"),
        (
            {**ON_HOST, "use_gloo_process_groups": False, "fake_process_group": False},
            "rows are exchanged between hosts",
        ),
        ({"memory_plan": "plan.json"}, " --memory-plan: .* no place for the memory"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    refuse_conflicts(parsed(*LAYERS), {"ngram": NGRAM.flag}, list(REFUSALS))
    refuse_conflicts(parsed(*LAYERS, **ON_HOST), {"ngram": NGRAM.flag}, list(REFUSALS))
    windows = parsed(*LAYERS, sculpt_windows=["a"], sculpt_attention="document")
    refuse_conflicts(windows, {"ngram": NGRAM.flag}, list(REFUSALS))
    with pytest.raises(ValueError, match=message):
        refuse_conflicts(parsed(*LAYERS, **settings), {"ngram": NGRAM.flag}, list(REFUSALS))


def test_tables_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--ngram-rows 1000 --ngram-cache-rows 0.25 --ngram-cache-policy lfu --ngram-staleness-read 3".split()
    late = ["--ngram-staleness-write", "4", "--ngram-staleness-warmup", "7"]
    config = config_of(*HOST, *words, *late, "--ngram-lr", "0.5")
    assert config.host == HostTables(CacheSettings(250, "lfu", 3, 4), 0.5, 7)
    assert config.num_parameters(10) == 2 * 10 * 8 * 64
    assert config_of(*HOST).host == HostTables(CacheSettings((1 << 20) // 10), 0.01, host_tables.FRESH_STEPS)
    assert config_of().host is None


def test_tables_that_do_not_fit_name_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "free_host_bytes", lambda: 1_000_000)
    words = [*HOST, "--ngram-rows", "10000", "--ngram-dim", "8"]
    config_of(*words, "--ngram-cache-rows", "0")
    with pytest.raises(
        ValueError, match=r"take 0\.00\d+ GB of each process's host memory, but there are 0\.001 GB: lower --ngram-rows"
    ):
        config_of(*words, "--ngram-cache-rows", "1")
