"""Keys of slices between their uses: off the device, read back once for each use, and freed."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.activation.arena import ALIGNMENT, HostArena
from bytescale_ext.activation.keys import SwappedKeys
from bytescale_ext.activation.link import Pairs, PlainLink, Ticket


class CountingLink(PlainLink):
    """Link that counts copies in both directions."""

    writes = reads = 0

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> Ticket:
        self.writes += 1
        return super().write(pairs, held)

    def read(self, pairs: Pairs, written: Ticket) -> Ticket:
        self.reads += 1
        for destination, source in pairs:
            destination.copy_(source)
        return None


def link_of(num_bytes: int = 1 << 12) -> CountingLink:
    return CountingLink(HostArena(torch.empty(num_bytes, dtype=torch.uint8)))


def keys_of(link: CountingLink) -> SwappedKeys:
    return SwappedKeys(torch.arange(24.0).view(2, 3, 2, 2), link)


def test_keys_are_written_once_and_read_for_each_use() -> None:
    link = link_of()
    keys = keys_of(link)
    for use in range(3):
        assert keys.take().flatten().tolist() == list(range(24))
        keys.release()
        assert keys._keys is None
        assert (link.writes, link.reads) == (1, use)
    keys.read_ahead()
    assert link.reads == 3
    assert keys.take().shape == (2, 3, 2, 2)
    assert link.reads == 3
    assert link.used_bytes
    del keys
    assert not link.used_bytes


def test_keys_that_are_used_next_stay_on_the_device() -> None:
    link = link_of()
    keys = keys_of(link)
    keys.take()
    keys.read_ahead()
    keys.release()
    assert (link.writes, link.reads) == (0, 0)
    keys.take()
    keys.release()  # the announced use was this use
    assert (link.writes, link.reads) == (1, 0)
    assert keys._keys is None


def test_keys_without_room_in_host_memory_stay_on_the_device() -> None:
    link = link_of(ALIGNMENT)
    first, second = keys_of(link), keys_of(link)
    first.release()
    with pytest.warns(UserWarning, match="raise --host-memory-gb"):
        second.release()
    assert first._keys is None
    assert second.take().flatten().tolist() == list(range(24))
    assert first.take().flatten().tolist() == list(range(24))
