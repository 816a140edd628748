"""Page-locked host memory on a GPU."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.activation.arena import pin

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
