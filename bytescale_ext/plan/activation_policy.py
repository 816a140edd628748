"""Who chooses what is kept, swapped and recomputed: pure functions from a load and a machine to an ``ActivationPlan``.

- ``plan_memo``: MEMO's program. All tensors but two share one fraction alpha that is swapped, the rest is recomputed.
- ``plan_priced``: each tensor has a price, the seconds to rebuild it for each of its bytes. Outputs of norms and of the
  activation function are nearly free and are never swapped; outputs of matrix products are. Free device memory keeps.
- ``plan_offload``: ByteScale's selective offloading (Eq. 3): a share of everything is swapped, nothing recomputed.
- ``plan_auto``: the one of these, or none, that is predicted to be the fastest of those that fit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from bytescale_ext.plan.activation import ActivationPlan, LayerLoad, Machine
from bytescale_ext.plan.activation_forecast import DeviceNeed, forecast

POLICIES: Final = ("none", "memo", "priced", "offload", "auto")


def memo_alpha(load: LayerLoad, machine: Machine) -> float:
    """MEMO's program (section 4.1): the largest alpha of one variable, so the least of its bounds::

        max alpha   s.t.  (S_input + S_attn + alpha S_others) / B <= T_layer
                          (n - 2) (S_input + S_attn + alpha S_others) <= M_CPU       0 <= alpha <= 1

    Raises:
        ValueError: host memory does not even hold the layer inputs and attention outputs.
    """
    always, others = load.bytes_of("input"), load.bytes_of("matrix", "cheap")
    room = machine.link_bytes_per_second * load.forward_seconds
    swapped_layers = load.in_flight * (load.num_layers - min(load.resident_layers, load.num_layers))
    if swapped_layers:
        if swapped_layers * always > machine.host_bytes:
            raise ValueError(
                f"layer inputs and attention outputs of {swapped_layers} layers need "
                f"{in_gigabytes(swapped_layers * always)} GB of host memory, and there are "
                f"{machine.host_bytes / 1e9:.4g}: give that, or use priced, which keeps on the device what host memory "
                "does not hold"
            )
        room = min(room, machine.host_bytes / swapped_layers)
    return min(1.0, max(0.0, (room - always) / others))


def plan_memo(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """MEMO: layer inputs and attention outputs are swapped, alpha of all others too, the rest is recomputed.

    Raises:
        ValueError: see ``memo_alpha``.
    """
    alpha = memo_alpha(load, machine)
    return ActivationPlan("memo", alpha, 1.0 - alpha, 1.0, False, min(load.resident_layers, load.num_layers))


def plan_offload(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """ByteScale's selective offloading: the least share with which one micro-batch fits on the device.

    The share r of everything is swapped and nothing is recomputed (ByteScale section 5.2). Of all l layers two stay
    whole, and (1 - r) of the others (Eq. 3). More than hides behind the forward pass is taken if memory asks for it,
    and the forecast shows its price; by the HDP plan no more than hides is (``cost.OffloadLimits``).
    """
    resident = min(load.resident_layers, load.num_layers)
    if forecast(ActivationPlan("none"), load, machine).device_bytes <= machine.device_bytes:
        return ActivationPlan("offload")
    room = DeviceNeed.of(load, resident, moves=True).most_kept(machine.device_bytes)
    share = _share(1.0 - room / load.bytes_of()) if resident < load.num_layers else 0.0
    return ActivationPlan("offload", share, 0.0, share, False, resident if share else 0)


def plan_priced(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """The shares of least predicted time: what is swapped, kept and recomputed of the tensors that have a price.

    With the number of layers that are kept whole fixed, time is a convex and piecewise linear function of three
    shares under linear bounds; so the least is where bounds meet, and all such points are tried. Ties go to the plan
    that moves less.

    Raises:
        ValueError: no shares fit; names the least host memory with which some do.
    """
    return _chosen(_priced, load, machine)


def _priced(load: LayerLoad, machine: Machine) -> ActivationPlan | None:
    """``plan_priced``, or None where no shares fit."""
    fewest = min(load.resident_layers, load.num_layers)
    plans = [
        ActivationPlan("priced", swap, max(0.0, 1.0 - swap - keep), input_swap, True, resident)
        for resident in range(fewest, load.num_layers)
        for input_swap, keep, swap in (_unmoved(load, machine, resident), *_corners(load, machine, resident))
    ]
    return _fastest([*plans, ActivationPlan("priced")], load, machine)


def _unmoved(load: LayerLoad, machine: Machine, resident: int) -> tuple[float, float, float]:
    """(input swap, keep, swap) shares without transfers, which need one layer less on the device."""
    room = DeviceNeed.of(load, resident, moves=False).most_kept(machine.device_bytes) - load.bytes_of("input")
    return 0.0, _share(room / load.bytes_of("matrix")), 0.0


def _corners(load: LayerLoad, machine: Machine, resident: int) -> Iterable[tuple[float, float, float]]:
    """(input swap, keep, swap) shares where two or more bounds meet, with ``resident`` layers kept whole."""
    planned = load.in_flight * (load.num_layers - resident)
    inputs, matrix = load.bytes_of("input"), load.bytes_of("matrix")
    room = DeviceNeed.of(load, resident, moves=True).most_kept(machine.device_bytes)
    if room < 0:
        return
    host, link = machine.host_bytes / planned, machine.link_bytes_per_second
    matrix_seconds = load.rebuild_seconds_of("matrix", machine)
    cheap_seconds = load.rebuild_seconds_of("cheap", machine)
    hidden = load.forward_seconds * link
    behind = (load.backward_seconds + matrix_seconds + cheap_seconds) * link
    input_swaps = {1.0, *(_share(x / inputs) for x in (inputs - room, hidden, behind, host))}
    for input_swap in sorted(input_swaps):
        keep = (room - (1.0 - input_swap) * inputs) / matrix
        if keep < -1e-12 or input_swap * inputs > host * (1 + 1e-12):
            continue
        keep = _share(keep)
        most = min(1.0 - keep, max(0.0, (host - input_swap * inputs) / matrix))
        balanced = (load.backward_seconds + cheap_seconds + (1.0 - keep) * matrix_seconds) * link - input_swap * inputs
        swaps = (0.0, most, (hidden - input_swap * inputs) / matrix, balanced / (matrix + matrix_seconds * link))
        for swap in sorted({min(most, _share(swap)) for swap in swaps}):
            yield input_swap, keep, swap


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _fastest(plans: list[ActivationPlan], load: LayerLoad, machine: Machine) -> ActivationPlan | None:
    """The plan of least predicted time that fits; of equal ones the first that needs the least host memory."""
    fitting = [(forecast(plan, load, machine), plan) for plan in plans]
    fitting = [(prediction, plan) for prediction, plan in fitting if prediction.fits(machine)]
    if not fitting:
        return None
    return min(fitting, key=lambda one: (one[0].step_seconds, one[0].host_bytes))[1]


def _chosen(
    choose: Callable[[LayerLoad, Machine], ActivationPlan | None], load: LayerLoad, machine: Machine
) -> ActivationPlan:
    """What ``choose`` finds. Raises ValueError where it finds nothing, with the least host memory that would do."""
    plan = choose(load, machine)
    if plan is not None:
        return plan
    everything = load.in_flight * load.num_layers * load.bytes_of()
    needed = least_budget(lambda size: choose(load, replace(machine, host_bytes=size)) is not None, everything)
    if needed is not None:
        remedy = f"it fits with {in_gigabytes(needed)} GB of host memory, or more device memory, or fewer tokens"
    else:
        ample = replace(machine, host_bytes=everything)
        most = forecast(ActivationPlan("none"), load, machine).device_bytes
        least = least_budget(lambda size: choose(load, replace(ample, device_bytes=size)) is not None, most) or most
        remedy = f"it takes {in_gigabytes(least)} GB of device memory, however much host memory, or fewer tokens"
    raise ValueError(
        f"activations of {load.num_tokens} tokens do not fit in {machine.device_bytes / 1e9:.4g} GB of device memory "
        f"and {machine.host_bytes / 1e9:.4g} GB of host memory: {remedy}"
    )


def least_budget(works: Callable[[float], bool], most: float) -> float | None:
    """The least of ``(0, most]`` that works, or a little more than it; None if ``most`` does not.

    ``works`` is true from some budget on.
    """
    if not works(most):
        return None
    fails, precise = 0.0, 1e-6 * most
    while most - fails > max(1e-4 * most, precise):
        middle = (fails + most) / 2
        fails, most = (fails, middle) if works(middle) else (middle, most)
    return most


def in_gigabytes(num_bytes: float) -> str:
    """A budget to give, rounded up: what is printed works when it is given."""
    return f"{math.ceil(num_bytes / 1e6 - 1e-9) / 1e3:.3f}"


def plan_auto(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """The policy that is predicted to be the fastest of those that fit; ties go to the simplest.

    Raises:
        ValueError: none fits; names the least host memory with which one does.
    """
    return _chosen(_auto, load, machine)


def _auto(load: LayerLoad, machine: Machine) -> ActivationPlan | None:
    """``plan_auto``, or None where none fits."""
    plans = [ActivationPlan("none"), plan_offload(load, machine)]
    with contextlib.suppress(ValueError):  # it does not fit; others may
        plans.append(plan_memo(load, machine))
    priced = _priced(load, machine)
    return _fastest([*plans, *([priced] if priced is not None else [])], load, machine)


def given_plan(policy: str, swap: float | None, recompute: float | None, resident_layers: int) -> ActivationPlan:
    """The plan of a policy with given shares, one of them at least; the other one is what is left.

    ``none`` is the shares alone: nothing is always swapped, and no layer is left out.
    """
    if policy == "none":
        return ActivationPlan("shares", swap or 0.0, recompute or 0.0, swap or 0.0)
    if policy == "offload":
        share = swap or 0.0
        return ActivationPlan("offload", share, 0.0, share, False, resident_layers if share else 0)
    swapped = swap if swap is not None else 1.0 - (recompute or 0.0)
    recomputed = recompute if recompute is not None else 1.0 - swapped
    return ActivationPlan(policy, swapped, recomputed, 1.0, policy == "priced", resident_layers)


def make_plan(policy: str, load: LayerLoad, machine: Machine) -> ActivationPlan:
    """The plan of a policy by name. Raises ValueError for an unknown name, or where the policy does not fit."""
    if policy == "none":
        return ActivationPlan("none")
    makers = {"memo": plan_memo, "priced": plan_priced, "offload": plan_offload, "auto": plan_auto}
    if policy not in makers:
        raise ValueError(f"the activation policy {policy} is unknown; choose one of {', '.join(POLICIES)}")
    return makers[policy](load, machine)
