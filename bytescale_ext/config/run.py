"""All decisions about a run, made before anything is built, as one frozen value.

``megatron/bytescale/arguments/resolve.py`` makes this value once from Megatron's arguments. Each enabled feature adds
its frozen configuration, and finds the configurations of earlier features by their type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.setup.choose import Decision
from bytescale_ext.plan.step.sizes import Cluster

if TYPE_CHECKING:
    import torch  # not imported while flags are parsed

Config = TypeVar("Config")


@dataclass(frozen=True)
class Process:
    """Position of this process in the run, and settings that all processes share.

    Attributes:
        rank: rank among all processes.
        on_cuda: whether the process computes on a GPU.
        dtype: type of the parameters.
        tensor_parallel: number of ranks that share each layer.
        timeout_minutes: timeout of a process group.
        log_interval: number of steps between log lines.
        train_iters: number of steps of the whole run, or 0 if unknown.
        stage: pipeline stage of this process.
        hdp_rank: HDP rank of this process.
    """

    rank: int
    on_cuda: bool
    dtype: torch.dtype
    tensor_parallel: int = 1
    timeout_minutes: float = 10.0
    log_interval: int = 100
    train_iters: int = 0
    stage: int = 0
    hdp_rank: int = 0

    @property
    def tensor_rank(self) -> int:
        """Rank among the processes that share the same layers, in Megatron's order of ranks."""
        return self.rank % self.tensor_parallel


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a training run.

    Attributes:
        shape: sizes of the model.
        cluster: number of HDP ranks, largest number of tokens of a micro-batch on a rank, and ranks per node.
        cost: measured seconds of the model (``--cost-file``), or None.
        process: this process.
        stage_layers: number of transformer layers of each pipeline stage.
        decision: setup of the planner, with all choices made.
        features: configuration of each enabled feature, by its name, in the order of the feature table.
    """

    shape: ModelShape
    cluster: Cluster
    cost: ModelCost | None
    process: Process
    stage_layers: tuple[int, ...]
    decision: Decision
    features: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def find(self, kind: type[Config]) -> Config | None:
        """Return the configuration of this class, or None if its feature is off."""
        return next((config for config in self.features.values() if isinstance(config, kind)), None)

    def get(self, kind: type[Config]) -> Config:
        """Return the configuration of this class, whose feature must be on."""
        config = self.find(kind)
        assert config is not None, f"{kind.__name__} is off: {tuple(self.features)}"
        return config

    def with_feature(self, name: str, config: object) -> RunConfig:
        """Return a copy with the configuration of one more feature."""
        return replace(self, features=MappingProxyType({**self.features, name: config}))
