from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def build(rank: int, world: int, settings: dict[str, Any]) -> Any:
    """Return (kind, eps, marks of the parameters, output) of a norm, or the error."""
    from megatron.bytescale.core.transformer.norm import LocalNorm

    values = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": True}
    try:
        norm: Any = LocalNorm(SimpleNamespace(**{**values, **settings}), 6, eps=1e-3, has_residual=True)  # type: ignore
    except ValueError as error:
        return str(error)
    marks = {name: parameter.sequence_parallel for name, parameter in norm.named_parameters()}
    return type(norm).__name__, norm.eps, marks, norm(torch.arange(12.0).view(2, 6)).detach()


def built(**settings: Any) -> Any:
    return run_ranks(build, 1, settings, init_group=False)[0]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_rms_norm(sequence_parallel: bool) -> None:
    kind, eps, marks, output = built(sequence_parallel=sequence_parallel)
    assert (kind, eps, marks) == ("RMSNorm", 1e-3, {"weight": sequence_parallel})
    x = torch.arange(12.0).view(2, 6)
    torch.testing.assert_close(output, x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt())


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layer_norm(sequence_parallel: bool) -> None:
    kind, eps, marks, output = built(normalization="LayerNorm", sequence_parallel=sequence_parallel)
    assert (kind, eps) == ("LayerNorm", 1e-3)
    assert marks == {"weight": sequence_parallel, "bias": sequence_parallel}
    x = torch.arange(12.0).view(2, 6)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(output, expected)
