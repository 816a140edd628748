"""Everything that is decided before a run builds anything, as one frozen value.

``megatron/bytescale/arguments/resolve.py`` makes it once from Megatron's arguments. Each feature that is on adds its
frozen configuration, and finds the configurations of earlier features by their type.
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
    """This process, and what it shares with the others.

    Attributes:
        rank: among all processes.
        local_rank: among the processes of its machine.
        on_cuda: it computes on a GPU.
        dtype: type of the parameters.
        tensor_parallel: ranks that share each layer.
        timeout_minutes: timeout of a process group.
        log_interval: steps between log lines.
        train_iters: steps of the whole run; 0 where that is not known.
        stage: its pipeline stage.
        hdp_rank: its pipeline, among those that train side by side.
    """

    rank: int
    local_rank: int
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
        """Its number among the ranks that share its layers, as Megatron numbers ranks."""
        return self.rank % self.tensor_parallel


@dataclass(frozen=True)
class RunConfig:
    """A training run.

    Attributes:
        shape: sizes of the model.
        cluster: HDP ranks, the most tokens of a micro-batch on one of them, ranks of a node.
        cost: measured seconds of the model (``--cost-file``), or None.
        process: this process.
        stage_layers: transformer layers of each pipeline stage.
        decision: what steps are planned for, with all choices made.
        features: configuration of each feature that is on, by the feature's name, in the order of the feature table.
    """

    shape: ModelShape
    cluster: Cluster
    cost: ModelCost | None
    process: Process
    stage_layers: tuple[int, ...]
    decision: Decision
    features: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def find(self, kind: type[Config]) -> Config | None:
        """Return the configuration of this class, or None where its feature is off."""
        return next((config for config in self.features.values() if isinstance(config, kind)), None)

    def get(self, kind: type[Config]) -> Config:
        """Return the configuration of this class, whose feature must be on."""
        found = self.find(kind)
        assert found is not None, f"{kind.__name__} is off: {tuple(self.features)}"
        return found

    def with_feature(self, name: str, config: object) -> RunConfig:
        """Return this run with the configuration of one more feature."""
        return replace(self, features=MappingProxyType({**self.features, name: config}))
