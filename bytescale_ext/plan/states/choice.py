"""Choice of the place of model states, together with the activation plan (``--state-policy auto``).

States and activations share a budget of device memory and a budget of host memory. For each option, the activation
policy plans with the memory that states leave, and the time of the step is predicted. The fastest option that fits is
chosen, or the first of equally fast options. So states stay resident if states and all activations fit: nothing is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.plan.activation.forecast import ActivationForecast, forecast
from bytescale_ext.plan.activation.load import MEMORY_BYTES_PER_SECOND, LayerLoad, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import in_gigabytes, least_budget
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.step_time import LayerTraffic, StateOption, end_seconds, update_seconds
from bytescale_ext.plan.states.timeline import Speeds

Policy = Callable[[LayerLoad, Machine], ActivationPlan]
"""Function that plans the activations of a load, and raises ValueError if no plan fits."""

DISK_SHARES: Final = (0.0, 0.5, 1.0)
WINDOWS: Final = (2, 1)
_EQUAL: Final = 1 + 1e-9


@dataclass(frozen=True)
class StageProblem:
    """A pipeline stage.

    Attributes:
        case: model states of the stage; the place of the states is ignored.
        load: load of its largest micro-batch or slice.
        policy: function that plans its activations.
        end_seconds: seconds of embedding, output layer and loss in one such micro-batch.
        key_bytes: host memory of keys that slices swap.
    """

    case: StateCase
    load: LayerLoad
    policy: Policy
    end_seconds: float = 0.0
    key_bytes: float = 0.0


@dataclass(frozen=True)
class StateProblem:
    """Input of the choice, equal on all ranks.

    Attributes:
        stages: stages of the pipeline.
        machine: budgets of a process for states and activations together, and its link.
        speeds: speeds of Adam on the host and of a disk.
        update_bytes_per_second: bytes of device memory that Adam reads and writes per second for resident states.
        disk_bytes: disk space of a process; 0 means no disk.
        num_microbatches: largest number of micro-batches, or slices of them, of a rank in a step.
        num_ranks: number of ranks that sum their gradients.
        options: options that the run allows.
    """

    stages: tuple[StageProblem, ...]
    machine: Machine
    speeds: Speeds
    update_bytes_per_second: float = MEMORY_BYTES_PER_SECOND
    disk_bytes: float = 0.0
    num_microbatches: int = 1
    num_ranks: int = 1
    options: tuple[StateOption, ...] = (StateOption(),)

    def update_seconds(self, option: StateOption) -> float:
        """Return the seconds of the slowest stage's update."""
        speed = self.update_bytes_per_second
        return max(update_seconds(stage.case, option, self.speeds, speed, self.num_ranks) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class OptionForecast:
    """An option that fits, with the bytes of the fullest stage.

    Attributes:
        option: place of the states.
        seconds: time of a step of full micro-batches.
        update_seconds: time of the update, a part of ``seconds``.
        state_bytes: device memory of the states.
        state_host_bytes: their host memory.
        activation_bytes: device memory of activations.
        activation_host_bytes: their host memory.
        link_share: share of the link that activations get.
    """

    option: StateOption
    seconds: float
    update_seconds: float
    state_bytes: float
    state_host_bytes: float
    activation_bytes: float
    activation_host_bytes: float
    link_share: float

    def described(self) -> str:
        """Return the option and its figures."""
        return (
            f"{self.option.described()}: {self.seconds:.4g} s a step ({self.update_seconds:.3g} s of it the update), "
            f"device {self.state_bytes / 1e9:.4g} GB and activations {self.activation_bytes / 1e9:.4g}, "
            f"host {self.state_host_bytes / 1e9:.4g} GB and activations {self.activation_host_bytes / 1e9:.4g}"
        )


@dataclass(frozen=True, slots=True)
class StateChoice:
    """Result of the choice, with its reasons.

    Attributes:
        chosen: chosen option with its figures.
        others: best fitting option of each other ``--state-stage``, fastest first.
        resident_bytes: smallest device memory for resident states if they do not fit, else 0.
    """

    chosen: OptionForecast
    others: tuple[OptionForecast, ...]
    resident_bytes: float = 0.0

    def described(self) -> str:
        """Return two lines: the choice with its reason, and the runners-up."""
        why = "the least predicted time"
        if self.resident_bytes:
            why = f"resident takes {in_gigabytes(self.resident_bytes)} GB of device memory"
        lines = [f"> bytescale: states auto ({why}): {self.chosen.described()}"]
        others = "; ".join(f"{prediction.option.described()} {prediction.seconds:.4g} s" for prediction in self.others)
        return "\n".join([*lines, f"> bytescale: states auto, what else fits: {others or 'nothing'}"])


def all_options(stages: Sequence[int], has_disk: bool) -> tuple[StateOption, ...]:
    """Return the options of these values of ``--state-stage``, resident states first."""
    shares = DISK_SHARES if has_disk else DISK_SHARES[:1]
    return (StateOption(), *(
        StateOption(stage, window, share)
        for stage in stages for share in shares for window in (WINDOWS if stage == 3 else WINDOWS[:1])
    ))  # fmt: skip


def choose_states(problem: StateProblem) -> StateChoice:
    """Return the choice. Raises ValueError, which names sufficient device or host memory, if no option fits."""
    fitting = sorted(_fitting(problem), key=lambda prediction: prediction.seconds)
    if not fitting:
        raise ValueError(_remedy(problem))
    equal = [prediction for prediction in fitting if prediction.seconds <= fitting[0].seconds * _EQUAL]
    chosen = min(equal, key=lambda prediction: problem.options.index(prediction.option))
    best = {prediction.option.stage: prediction for prediction in reversed(fitting)}
    others = sorted(
        (prediction for stage, prediction in best.items() if stage != chosen.option.stage),
        key=lambda prediction: prediction.seconds,
    )
    resident = 0.0 if 0 in best else _least_device(replace(problem, options=problem.options[:1])) or 0.0
    return StateChoice(chosen, tuple(others), resident)


def _fitting(problem: StateProblem) -> Iterator[OptionForecast]:
    for option in problem.options:
        prediction = predict_option(problem, option)
        if prediction is not None:
            yield prediction


def predict_option(problem: StateProblem, option: StateOption) -> OptionForecast | None:
    """Return the figures of an option, or None if it does not fit."""
    machine, cases = problem.machine, [stage.case for stage in problem.stages]
    on_device = [option.device_bytes(case) for case in cases]
    on_host = [option.host_bytes(case) for case in cases]
    in_file = max(option.of(case).file_bytes for case in cases) if option.disk_share else 0
    in_build = max(option.of(case).build_bytes for case in cases) if option.stage else 0.0
    update = 0.0 if option.stage else max(case.resident_update_bytes for case in cases)
    least = min(machine.device_bytes - max(on_device) - update, machine.host_bytes - max(on_host))
    if least < 0 or in_build > machine.device_bytes or in_file > problem.disk_bytes:
        return None
    traffic = [LayerTraffic.of(case, option, problem.speeds) for case in cases]
    loads = [
        layer_traffic.longer(stage.load, option.window_layers)
        for layer_traffic, stage in zip(traffic, problem.stages, strict=True)
    ]
    share = min(layer_traffic.link_share(load) for layer_traffic, load in zip(traffic, loads, strict=True))
    budgets = tuple(
        replace(
            machine,
            device_bytes=machine.device_bytes - states,
            host_bytes=machine.host_bytes - pages,
            link_bytes_per_second=share * machine.link_bytes_per_second,
            state_bytes=states,
        )
        for states, pages in zip(on_device, on_host, strict=True)
    )
    forecasts = [_activations(*of_stage) for of_stage in zip(problem.stages, loads, budgets, strict=True)]
    fitting = [predicted for predicted in forecasts if predicted is not None]
    if len(fitting) < len(forecasts):
        return None
    each = max(
        predicted.step_seconds + stage.end_seconds + end_seconds(stage.case, option, problem.speeds)
        for predicted, stage in zip(fitting, problem.stages, strict=True)
    )
    update_seconds = problem.update_seconds(option)
    return OptionForecast(
        option=option,
        seconds=(problem.num_microbatches + len(cases) - 1) * each + update_seconds,
        update_seconds=update_seconds,
        state_bytes=max(on_device),
        state_host_bytes=max(on_host),
        activation_bytes=max(predicted.device_bytes for predicted in fitting),
        activation_host_bytes=max(predicted.host_bytes for predicted in fitting),
        link_share=share,
    )


def _activations(stage: StageProblem, load: LayerLoad, left: Machine) -> ActivationForecast | None:
    """Return the figures of a stage's activations next to its states, or None if they do not fit.

    Training plans activations by the stage's own load, so this load must fit too.
    """
    machine = replace(left, host_bytes=left.host_bytes - stage.key_bytes)
    forecasts = []
    try:
        for planned_load in (stage.load,) * (load != stage.load) + (load,):
            forecasts.append(forecast(stage.policy(planned_load, machine), planned_load, machine))
    except ValueError:
        return None
    has_room = machine.host_bytes >= 0 and all(predicted.fits(machine) for predicted in forecasts)
    return forecasts[-1] if has_room else None


def _remedy(problem: StateProblem) -> str:
    """Return the message if no option fits, with budgets that would be enough."""
    machine = problem.machine
    budgets = f"{machine.device_bytes / 1e9:.4g} GB of device memory and {machine.host_bytes / 1e9:.4g} of host memory"
    remedies = [
        f"{flag} {in_gigabytes(least)}"
        for flag, least in (
            ("--device-memory-gb", _least_device(problem)),
            ("--host-memory-gb", _least(problem, "host_bytes", problem.options)),
        )
        if least is not None
    ]
    advice = f"give {' or '.join(remedies)}, or" if remedies else "use"
    return (
        f"model states and activations do not fit in {budgets}: {advice} fewer tokens in a micro-batch, more "
        "pipeline stages or tensor-parallel ranks, or --use-distributed-optimizer"
    )


def _least_device(problem: StateProblem) -> float | None:
    """Return the least device memory with which an option fits, or slightly more; None if none ever does."""
    return _least(problem, "device_bytes", problem.options)


def _least(problem: StateProblem, name: str, options: Sequence[StateOption]) -> float | None:
    def works(size: float) -> bool:
        larger = replace(problem, machine=replace(problem.machine, **{name: size}))
        return any(predict_option(larger, option) is not None for option in options)

    needed = sum(
        2 * stage.case.resident_bytes
        + 4 * stage.load.times_held * stage.load.num_layers * stage.load.bytes_of()
        + stage.key_bytes
        for stage in problem.stages
    )
    return least_budget(works, 2 * needed + max(stage.load.head_bytes for stage in problem.stages))
