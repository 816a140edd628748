"""Page-locked host memory on a GPU."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.activation.arena import HostArena, pin, pinned_block
from bytescale_ext.activation.link import make_link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_refused_registration_leaves_no_error_behind() -> None:
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    pin(memory)
    with pytest.raises(RuntimeError, match="cudaHostRegister of 1048576 bytes: error"):
        pin(memory)
    assert torch.ones(8, device="cuda").sum().item() == 8


def test_a_freed_block_can_be_registered_again() -> None:
    device = torch.arange(1 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(20):
        block = pinned_block(1 << 26)
        assert block.is_pinned()
        block[: 1 << 20].copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(block[: 1 << 20], device.cpu())
        del block


def test_copies_run_on_streams_of_their_own() -> None:
    """Computation overwrites a source and reads a destination only after their copies."""
    link = make_link(HostArena(pinned_block(1 << 22)), on_cuda=True)
    part = link.take(1 << 20)
    assert part is not None
    host = link.arena.view(part, (1 << 20,), torch.uint8)
    for number in range(10):
        source = torch.full((1 << 20,), number, dtype=torch.uint8, device="cuda")
        written = link.write([(host, source)], [source])
        destination = torch.empty_like(source)
        link.wait(link.read([(destination, host)], written))
        link.settle()
        source.fill_(255)
        assert bool((destination == number).all())
    link.give_back(part, None)
