"""Settings of activation policies (MEMO; ByteScale section 5.2), and the plan of each micro-batch under them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from bytescale_ext.plan.activation.load import LayerLoad, LayerSettings, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.setup.choose import Decision, choose_activations
from bytescale_ext.plan.setup.offload import offloading_policy
from bytescale_ext.plan.setup.policy import PolicySlices, StagePolicy
from bytescale_ext.plan.setup.setup import Policy
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True)
class ActivationConfig:
    """Activation policy of one process.

    Attributes:
        decision: decision for all stages.
        stage: pipeline stage of this process.
        slicing: slices of the running step if the planner chooses them for each step, else None; None also before the
            first step.
        assumed: log line about unmeasured speeds that plans assume, with advice on measuring them; empty if none are.
        measures: speeds to measure when the model is built, "link" and "layers". Plans then use the measured speeds
            instead of assumed speeds.
    """

    decision: Decision
    stage: int = 0
    slicing: Slicing | None = None
    assumed: str = ""
    measures: tuple[str, ...] = ()

    def in_slices(self, slicing: Slicing) -> ActivationConfig:
        """Return the policy for a step with these slices, or the policy itself if slices are equal in all steps."""
        chosen = self.choice is not None and slicing in self.choice.slicings
        return replace(self, slicing=slicing) if chosen else self

    @cached_property
    def of_stage(self) -> StagePolicy:
        """Policy of this stage, in the slices of the step or, before the first step, in the finest slices that fit."""
        if self.decision.offload is not None:
            return offloading_policy(self.decision.setup)
        slicing = self.slicing
        if slicing is None and self.choice is not None:
            slicing = self.choice.options[-1]
        return self.decision.policy(self.stage, slicing)

    @property
    def choice(self) -> PolicySlices | None:
        """Function that chooses the slices of each step; None if slices are equal in all steps."""
        slices = self.decision.slices
        return slices if isinstance(slices, PolicySlices) else None

    @property
    def policy(self) -> Policy:
        """Name of the policy, or given shares."""
        return self.decision.setup.policy

    @property
    def machine(self) -> Machine:
        """Memory and link bandwidth for activations of this process."""
        return self.of_stage.machine

    @property
    def cost(self) -> ModelCost:
        """Seconds of the model, measured or estimated from rates."""
        return self.of_stage.cost

    @property
    def layers(self) -> LayerSettings:
        """Layer settings of this stage."""
        return self.of_stage.layers

    @property
    def host_bytes(self) -> float:
        """Host memory of this process for activations and for swapped keys of slices."""
        return self.machine.host_bytes + self.layers.key_host_bytes

    @property
    def largest(self) -> LayerLoad:
        """Load of the largest micro-batch, or of its largest slice."""
        return self.of_stage.largest

    def load(self, num_tokens: int, forward_seconds: float, backward_seconds: float) -> LayerLoad:
        """Return the load of one micro-batch from its tokens and the seconds of one layer."""
        return self.of_stage.load(num_tokens, forward_seconds, backward_seconds)

    def plan(self, load: LayerLoad, share: float = 0.0) -> ActivationPlan:
        """Return the plan of a micro-batch; see ``StagePolicy.plan``."""
        return self.of_stage.plan(load, share)

    def with_speeds(self, cost: ModelCost, link_bytes_per_second: float) -> ActivationConfig:
        """Return a copy with measured speeds. Raises ValueError if a sequence or micro-batch then does not fit."""
        measured = choose_activations(self.decision, cost, link_bytes_per_second)
        return replace(self, decision=measured, assumed="", measures=())

    def described(self) -> str:
        """Return a line about the plan of the largest micro-batch, and a line about the speeds that it assumes."""
        return "\n".join(filter(None, (self._plan_described(), self.assumed)))

    def _plan_described(self) -> str:
        if self.decision.offload is not None:
            return self.decision.offload.described()
        if self.choice is not None and self.slicing is None:
            return self.choice.described(self.policy.name)
        return self.of_stage.described()
