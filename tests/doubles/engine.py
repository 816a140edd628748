"""TransformerEngine's grouped products in plain PyTorch, with their public signature, in Megatron's own wrappers.

``grouped_experts`` builds Megatron's ``TEGroupedMLP`` from Megatron's ``TEColumnParallelGroupedLinear`` and
``TERowParallelGroupedLinear``, whose base class is the ``GroupedLinear`` below. Other classes of TransformerEngine are
empty.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from packaging.version import Version

PLAYED = "2.20.2"
_MODULES = ("", ".pytorch", ".pytorch.fp8", ".pytorch.distributed", ".pytorch.router")


class GroupedLinear(torch.nn.Module):
    """Products of groups of rows with their own weights, ``weight0``, ``weight1``, ..., [out_features, in_features]."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__()
        not_played = fuse_wgrad_accumulation, delay_wgrad_compute, single_grouped_weight, bias, ub_overlap_rs
        assert not any((*not_played, ub_overlap_ag)), "not played"
        assert parallel_mode in (None, "column", "row")
        size = 1 if tp_group is None else tp_group.size()
        out_features //= size if parallel_mode == "column" else 1
        in_features //= size if parallel_mode == "row" else 1
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.tp_size = bias, size
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            if init_method is not None:
                init_method(weight)
            self.register_parameter(f"weight{number}", weight)

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: list[int],
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the products [rows, out_features]; ``m_splits``: rows of each group. A group may have no row."""
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        assert sum(m_splits) == len(inp), "Each row belongs to a group."
        parts = inp.reshape(-1, self.in_features).split(m_splits)
        return torch.cat([part @ getattr(self, f"weight{number}").t() for number, part in enumerate(parts)])


class _Package(types.ModuleType):
    """A module of TransformerEngine whose other classes are empty."""

    __path__: tuple[str, ...] = ()
    __version__ = PLAYED

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        played: Any = _Package(name) if name.islower() else type(name, (torch.nn.Module,), {})
        setattr(self, name, played)
        return played


@cache
def wrappers() -> types.ModuleType:
    """Return a second copy of Megatron's module of wrappers, made as if TransformerEngine were installed."""
    from megatron.core import utils

    spec = importlib.util.find_spec("megatron.core.extensions.transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    packages = {f"transformer_engine{name}": _Package(name) for name in _MODULES}
    engine = packages["transformer_engine"]
    engine.pytorch = packages["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    engine.pytorch.GroupedLinear = GroupedLinear
    own = importlib.util.spec_from_file_location("tests.doubles.engine_wrappers", spec.origin)
    assert own is not None
    assert own.loader is not None
    module = importlib.util.module_from_spec(own)
    before, sys.modules[own.name] = utils._te_version, module
    sys.modules |= packages
    utils._te_version = Version(PLAYED)
    try:
        own.loader.exec_module(module)
    finally:
        utils._te_version = before
        for name in packages:
            del sys.modules[name]
    module.is_te_min_version = lambda version: Version(PLAYED) >= Version(version)  # type: ignore[attr-defined]
    return module


def grouped_experts(*_: object) -> partial[torch.nn.Module]:
    """Return the builder of ``TEGroupedMLP`` with the played products."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    played = wrappers()
    submodules = GroupedMLPSubmodules(
        linear_fc1=played.TEColumnParallelGroupedLinear, linear_fc2=played.TERowParallelGroupedLinear
    )
    return partial(TEGroupedMLP, submodules=submodules)


def install_engine_experts() -> None:
    """Give Megatron's local layers TransformerEngine's experts in this process."""
    from megatron.core.models.backends import LocalSpecProvider

    LocalSpecProvider.grouped_mlp_modules = grouped_experts  # type: ignore[method-assign, assignment]


def expert_name(name: str) -> str:
    """Return the name that a parameter of grouped experts has in Megatron's own experts; other names are unchanged."""
    return re.sub(r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name)
