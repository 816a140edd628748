"""The flags of an embedding in host memory."""

from __future__ import annotations

from typing import Any

import pytest

from bytescale_ext.config.memory.host_tables import EmbeddingConfig, HostTables
from bytescale_ext.states.cache import CacheSettings
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.features.tables import flags as host_tables
from megatron.bytescale.features.tables.embedding import EMBEDDING, REFUSALS
from tests.bytescale.features.activations.test_flags import parsed
from tests.config.runs import run_of

HOST = ("--embedding-storage", "host")
NEEDED = {
    "fp16": False, "ckpt_format": "torch_dist", "async_save": False, "use_gloo_process_groups": True,
    "untie_embeddings_and_output_weights": True, "mtp_num_layers": None,
}  # fmt: skip


def config_of(*words: str) -> Any:
    return EMBEDDING.resolve(EMBEDDING.read(parsed(*HOST, *words)), run_of())


def test_what_is_given() -> None:
    run = run_of()
    config = config_of("--embedding-cache-rows", "0.25", "--embedding-lr", "0.5", "--embedding-staleness-read", "3")
    vocab = run.shape.vocab
    host = HostTables(CacheSettings(vocab // 4, "lru", 3, 0), 0.5, host_tables.FRESH_STEPS)
    assert config == EmbeddingConfig(host, vocab, run.shape.hidden)
    assert config_of().host == HostTables(CacheSettings(vocab // 10), 0.01, host_tables.FRESH_STEPS)
    assert not EMBEDDING.is_on(parsed())
    assert EMBEDDING.is_on(parsed(*HOST))


def test_bad_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--embedding-cache-rows 2 is not a share from 0 to 1"):
        config_of("--embedding-cache-rows", "2")
    with pytest.raises(ValueError, match="--embedding-staleness-write -1 must be at least 0"):
        config_of("--embedding-staleness-write", "-1")
    monkeypatch.setattr(host_tables, "free_host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"the embedding and its cache take .* lower --embedding-cache-rows, or use"):
        config_of()


def test_its_budget_is_what_activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "free_host_bytes", lambda: 5e9)
    assert host_tables.free_bytes_of_process(parsed(host_memory_gb=None)) == 5e9
    assert host_tables.free_bytes_of_process(parsed(host_memory_gb=2.0)) == 3e9
    assert host_tables.free_bytes_of_process(parsed(host_memory_gb=9.0)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"untie_embeddings_and_output_weights": False}, "add --untie-embeddings-and-output-weights"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"draft_heads": "clover"}, "--draft-heads"),
        ({"fp16": True}, "use --bf16"),
        ({"ckpt_format": "torch"}, "use torch_dist"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    on = {"embedding": EMBEDDING.flag}
    refuse_conflicts(parsed(*HOST, **NEEDED), on, list(REFUSALS))
    with pytest.raises(ValueError, match=message):
        refuse_conflicts(parsed(*HOST, **{**NEEDED, **settings}), on, list(REFUSALS))
