"""Strategies that the training of a model accepts, by Megatron's checks and ours, once for each kind of strategy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.search.task import Task
from megatron.bytescale.cli.search.script import ScriptedRun
from megatron.bytescale.cli.shared.model_flags import FLAG, arguments_of


def choices_of(strategy: Strategy) -> tuple[object, ...]:
    """Return the choices of a strategy, without its sizes."""
    return (
        strategy.tensor_parallel > 1,
        strategy.num_stages > 1,
        len(set(strategy.stage_layers)) > 1,
        strategy.chunks > 1,
        strategy.chooses_slices,
        strategy.activations,
        strategy.loss_tokens is not None,
        strategy.shares_optimizer,
        strategy.expert_parallel > 1,
    )


@dataclass
class Trainable:
    """Tells whether a training accepts the flags of a strategy, together with the model's flags.

    Each mesh of ranks is checked with strategies whose layers keep all activations. Each combination of the other
    choices is checked once, for any mesh and any numbers of tokens and layers.

    Attributes:
        flags: flags of the model, as the user gave them.
        task: task of the search.
        reasons: reason of the refusal of each kind of strategy; empty if it is accepted.
    """

    flags: str
    task: Task
    reasons: dict[tuple[object, ...], str] = field(default_factory=dict)

    def __call__(self, strategy: Strategy) -> bool:
        """Return whether the training accepts a strategy."""
        mesh = Strategy(
            strategy.tensor_parallel,
            strategy.stage_layers,
            strategy.tokens_per_rank,
            expert_parallel=strategy.expert_parallel,
        )
        ranks = (mesh.tensor_parallel, mesh.num_stages, mesh.expert_parallel)
        return self._accepts(ranks, mesh) and self._accepts(choices_of(strategy), strategy)

    def _accepts(self, kind: tuple[object, ...], strategy: Strategy) -> bool:
        if kind not in self.reasons:
            self.reasons[kind] = self.refusal(strategy)
        return not self.reasons[kind]

    def refusal(self, strategy: Strategy) -> str:
        """Return why the training refuses strategies of this kind; empty if it accepts them.

        The search itself checks whether a strategy fits in memory, because that depends on its sizes.
        """
        if strategy.device_gb is not None:
            strategy = replace(strategy, device_gb=self.task.devices.memory_bytes / 1e9)
        words = ScriptedRun.of(self.flags, self.task, strategy).flags()
        try:
            arguments_of(words, self.task.cost.on_cuda and "--cpu" not in words, self.task.devices.count)
        except ValueError as error:
            return str(error).removeprefix(f"{FLAG}: ")
        return ""

    def refused(self) -> list[str]:
        """Return the distinct reasons why strategies were not tried."""
        return list(dict.fromkeys(filter(None, self.reasons.values())))
