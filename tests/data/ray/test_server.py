"""Server without Ray: its cache, and the tokens that it serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bytescale_ext.data.ray import actors
from bytescale_ext.data.ray.server import PLACE, TokenCache
from tests.data.ray.files import SEQ_LENGTH, samples_of, server
from tests.data.text_files import LocalText


def test_a_cache_holds_the_latest_and_never_more_than_its_limit() -> None:
    cache = TokenCache(10)
    for key, size in enumerate((4, 5, 3, 11, 2)):
        cache.put((0, key), np.zeros(size))
        assert cache.held_tokens <= 10
        cache.get((0, 1))
    assert [key for key in range(5) if cache.get((0, key)) is not None] == [1, 2, 4]
    assert (cache.held_tokens, cache.peak_tokens) == (10, 10)


@pytest.mark.parametrize("limit_tokens", [1, 200, 1 << 20])
def test_a_server_gives_the_tokens_of_the_local_loader(text: Path, limit_tokens: int) -> None:
    local, one = LocalText(text, SEQ_LENGTH), server(text, limit_tokens)
    samples, indices = samples_of(text)
    places = samples.places(np.arange(len(local)), indices)
    lengths = one.lengths(places)
    assert lengths.tolist() == [local.length(i) for i in range(len(local))]
    for past_end in (0, 1):
        ranges = np.stack([lengths // 3, lengths + past_end], axis=1)
        tokens, counts = one.read(places, ranges)
        expected = [local.read(i, start, stop) for i, (start, stop) in enumerate(ranges.tolist())]
        assert counts.tolist() == [len(part) for part in expected]
        assert tokens.tolist() == np.concatenate(expected).tolist()
    assert one.held_tokens()[1] <= limit_tokens


def test_documents_unlike_their_index_are_refused(text: Path) -> None:
    samples, indices = samples_of(text)
    places = samples.places(np.arange(samples.num_samples), indices)
    counted = places[places["is_counted"]][:1]
    text.write_bytes(text.read_bytes().replace(b"a", b" a"))
    with pytest.raises(ValueError, match=r"has changed|not JSON"):
        server(text).lengths(counted)

    def doubled(raw: bytes) -> tuple[np.ndarray, bool]:
        return np.zeros(2 * len(raw), dtype=np.int64), True

    one = np.zeros(1, dtype=PLACE)
    text.write_text('{"text": "' + "a" * 40 + '"}\n')
    one["num_bytes"] = text.stat().st_size
    with pytest.raises(ValueError, match=r"document 0 has 80 tokens but fewer bytes.*--hdp-loader local"):
        server(text, build_encode=lambda: doubled).lengths(one)
    text.unlink()
    with pytest.raises(ValueError, match=r"a.jsonl: cannot read .*every machine"):
        server(text).lengths(one)


def test_a_line_without_text_is_named(text: Path) -> None:
    text.write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:2: no text under the key 'text'"):
        server(text).index(0, 0, 1 << 40)


def test_a_run_ends_the_ray_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr(actors, "ray_module", lambda: SimpleNamespace(shutdown=lambda: ends.append("shutdown")))
    servers = object.__new__(actors.RemoteServers)  # without actors
    servers.close()
    servers.close()
    assert ends == ["shutdown"] * 2
