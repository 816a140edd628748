"""Settings of activation policies (MEMO; ByteScale section 5.2), and the plan of each micro-batch under them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from bytescale_ext.config.memory.offload import PlannedOffload, planned_offload
from bytescale_ext.plan.activation.forecast import forecast, stage_cost
from bytescale_ext.plan.activation.load import LayerLoad, LayerSettings, Machine, full_load, load_of_tokens
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import given_plan, in_gigabytes, make_plan
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.policy_choice import PolicyOption
from bytescale_ext.plan.step.sizes import Slicing

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class SlicedStages:
    """How pipeline stages run their layers in one slicing that the planner may choose for a step.

    Attributes:
        slicing: with the longest document whose keys are kept.
        lengths: tokens of each slice of the longest document.
        stages: the layers of each stage.
    """

    slicing: Slicing
    lengths: tuple[int, ...]
    stages: tuple[LayerSettings, ...]


@dataclass(frozen=True)
class ActivationConfig:
    """An activation policy and everything that its plans depend on.

    Attributes:
        policy: one of ``POLICIES``.
        swap, recompute: given shares of the tokens, or None.
        machine: memory and link of one process.
        cost: of the model in seconds, measured or estimated from rates.
        num_tokens: of the largest micro-batch on one rank.
        length: tokens of the longest sequence.
        slices: tokens of each slice of a micro-batch, or their proportion; a single one without ``--seq1f1b-slices``.
        layers: the layers of this process's pipeline stage (of all its model chunks).
        offload: limits of the shares that HDP plans choose; None where one share is given for all micro-batches.
        assumed: a log line about unmeasured speeds that plans assume, with how to measure them; empty: none.
        measures: the speeds to measure when the model is built, "link" and "layers"; plans then use these speeds
            instead of the assumed ones.
        options: what the planner chooses from for each step (``--seq1f1b-slices auto``); empty where slices are given.
        stage: pipeline stage of this process.
        key_bytes: host memory for swapped keys of slices; that of ``machine`` is for activations.
        link_share: of the link's speed that activations get, beside parameters that travel to the device.
    """

    policy: str
    swap: float | None
    recompute: float | None
    machine: Machine
    cost: ModelCost
    num_tokens: int
    length: int
    slices: tuple[int, ...]
    layers: LayerSettings
    offload: PlannedOffload | None = None
    assumed: str = ""
    measures: tuple[str, ...] = ()
    options: tuple[SlicedStages, ...] = ()
    stage: int = 0
    key_bytes: float = 0.0
    link_share: float = 1.0

    def on_stage(self, layers: LayerSettings) -> ActivationConfig:
        """Return this policy for the layers of another stage, beside the keys that it has in host memory."""
        keys = layers.key_host_bytes
        left = replace(self.machine, host_bytes=self.machine.host_bytes + self.key_bytes - keys)
        return replace(self, layers=layers, machine=left, key_bytes=keys)

    def in_slices(self, slicing: Slicing) -> ActivationConfig:
        """Return the policy of this stage in a step of these slices; the policy itself where slices are given."""
        found = [option for option in self.options if option.slicing == slicing]
        return self._in_option(found[0], self.stage) if found else self

    def _in_option(self, option: SlicedStages, stage: int) -> ActivationConfig:
        return replace(self, slices=option.lengths, layers=option.stages[stage], options=(), stage=stage)

    @cached_property
    def fitting_options(self) -> tuple[PolicyOption, ...]:
        """The slicings in which the policy fits on every stage, each with the cost of its slowest stage."""
        found = []
        for option in self.options:
            stages = [self._in_option(option, stage) for stage in range(len(option.stages))]
            try:
                for one in stages:
                    one.check_fits()
            except ValueError:
                continue
            costs = (one.stage_cost(has_head=one is stages[-1]) for one in stages)
            found.append(PolicyOption(option.slicing, max(costs, key=lambda cost: cost.both.b)))
        return tuple(found)

    def stage_cost(self, has_head: bool) -> StageCost:
        """Return the seconds of this stage in its largest micro-batch or slice; ``has_head``: with the output layer."""
        load = self.largest
        return stage_cost(self.cost, load, self.plan(load), self.machine, has_head)

    def load(self, num_tokens: int, forward_seconds: float, backward_seconds: float) -> LayerLoad:
        """Return the load of one micro-batch of a rank, by its tokens and the times of one layer."""
        return load_of_tokens(self.cost, num_tokens, forward_seconds, backward_seconds, self.layers)

    @property
    def largest(self) -> LayerLoad:
        """The largest micro-batch, or slice of one (``full_load``)."""
        return full_load(self.cost, self.num_tokens, self.length, self.layers, self.slices)

    def plan(self, load: LayerLoad, share: float = 0.0) -> ActivationPlan:
        """Return the plan of a micro-batch. ``share``: offloaded by the HDP plan, if that chooses shares.

        Raises:
            ValueError: the policy does not fit; never raised for a load smaller than one that fits.
        """
        resident = min(self.layers.resident_layers, load.num_layers)
        if self.offload is not None:
            return given_plan("offload", share, None, resident)
        if self.swap is None and self.recompute is None:
            return make_plan(self.policy, load, self.machine)
        return given_plan(self.policy, self.swap, self.recompute, resident)

    def with_speeds(self, cost: ModelCost, link_bytes_per_second: float) -> ActivationConfig:
        """Return this policy with measured speeds. Raises ValueError where a sequence or micro-batch does not fit."""
        machine = replace(self.machine, link_bytes_per_second=self.link_share * link_bytes_per_second)
        found = replace(self, machine=machine, cost=cost, assumed="", measures=())
        if self.offload is not None:
            found = replace(found, offload=planned_offload(self.offload.hdp, machine, cost, found.largest))
        found.check_fits()
        return found

    def check_fits(self) -> None:
        """Raise ValueError where the largest micro-batch exceeds a budget, naming a sufficient budget."""
        if self.options:
            self._check_options()
            return
        load, machine = self.largest, self.machine
        plan = self.plan(load)
        needed = forecast(plan, load, machine)
        what = f"micro-batches of {load.num_tokens} tokens with {plan.swap:.3g} of the tokens swapped"
        if needed.host_bytes > machine.host_bytes * _ROUNDING:
            raise ValueError(
                f"{what} take {in_gigabytes(needed.host_bytes)} GB of host memory, and --host-memory-gb is "
                f"{machine.host_bytes / 1e9:.4g}: give at least that, or swap less"
            )
        if needed.device_bytes > machine.device_bytes * _ROUNDING:
            raise ValueError(
                f"{what} take {in_gigabytes(needed.device_bytes)} GB of device memory, and --device-memory-gb is "
                f"{machine.device_bytes / 1e9:.4g}: give at least that, or fewer tokens, or a policy that keeps less"
            )

    def _check_options(self) -> None:
        """Raise ValueError where the policy fits in no slices, about the ones in which most stages hold least."""
        if not self.fitting_options:
            option = next(one for one in self.options if one.slicing.num_slices == self.options[-1].slicing.num_slices)
            for stage in range(len(option.stages)):
                self._in_option(option, stage).check_fits()

    def described(self) -> str:
        """Return a line about the plan of the largest micro-batch, and one about the speeds that it assumes."""
        return "\n".join(filter(None, (self._plan_described(), self.assumed)))

    def _plan_described(self) -> str:
        if self.offload is not None:
            return self.offload.described()
        if self.options:
            return self._options_described()
        load = self.largest
        plan = self.plan(load)
        predicted = forecast(plan, load, self.machine)
        return (
            f"> bytescale: activations {plan.policy}: swapped {plan.swap:.3f}, kept {plan.keep:.3f}, recomputed "
            f"{plan.recompute:.3f}, layer inputs and attention outputs swapped {plan.input_swap:.3f}; predicted for "
            f"{load.num_tokens} tokens: layers {predicted.step_seconds * 1e3:.4g} ms, device "
            f"{predicted.device_bytes / 1e9:.4g} GB, host {predicted.host_bytes / 1e9:.4g} GB"
        )

    def _options_described(self) -> str:
        fitting = [option.slicing.num_slices for option in self.fitting_options]
        counts = ", ".join(map(str, dict.fromkeys(fitting)))
        return (
            f"> bytescale: activations {self.policy}: shares follow from the slices of each step; they fit in {counts} "
            f"slices, in {len(fitting)} of {len(self.options)} combinations of slices, order and kept keys"
        )
