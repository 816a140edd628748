"""Copies to a device: without a GPU only which path they take."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.parallel.upload import upload


def test_only_copies_to_cuda_use_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[object, object]] = []
    host = torch.arange(3)

    class Pinned:
        def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
            moves.append((device.type, non_blocking))
            return host

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: Pinned())
    assert upload(host, torch.device("cpu")) is host
    assert moves == []
    assert upload(host, torch.device("cuda")) is host
    assert moves == [("cuda", True)]
