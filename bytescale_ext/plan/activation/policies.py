"""Activation policies: pure functions from a load and a machine to an ``ActivationPlan``.

- ``plan_memo``: MEMO's program. It swaps all inputs and a fraction alpha of all other tensors, and recomputes the rest.
- ``plan_priced``: each tensor has a price, the seconds to recompute one byte. Outputs of norms and of the activation
  function are nearly free, so they are recomputed. Outputs of matrix products are swapped, or kept if memory is free.
- ``plan_offload``: ByteScale's selective offloading (Eq. 3). It swaps one share of every tensor and recomputes nothing.
- ``plan_auto``: the fitting policy with the shortest predicted time, which may be "none".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from bytescale_ext.plan.activation.check import check_activation_plan
from bytescale_ext.plan.activation.forecast import ActivationForecast, DeviceNeed, forecast
from bytescale_ext.plan.activation.load import LayerLoad, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan

PRODUCTS: Final = ("matrix", "key", "view")
"""Kinds of tensors in the outputs of matrix products."""

POLICIES: Final = ("none", "memo", "priced", "offload", "auto")


def memo_alpha(load: LayerLoad, machine: Machine) -> float:
    """Solve MEMO's program (section 4.1); with one variable the largest alpha is the smallest of its bounds::

        max alpha   s.t.  (S_input + S_attn + alpha S_others) / B <= T_layer
                          (n - 2) (S_input + S_attn + alpha S_others) <= M_CPU       0 <= alpha <= 1

    Raises:
        ValueError: host memory is too small for the layer inputs and attention outputs.
    """
    always, others = load.bytes_of("input"), load.bytes_of("matrix", "cheap")
    room = machine.link_bytes_per_second * load.forward_seconds
    swapped_layers = load.times_held * (load.num_layers - min(load.resident_layers, load.num_layers))
    if swapped_layers:
        if swapped_layers * always > machine.host_bytes:
            raise ValueError(
                f"layer inputs and attention outputs of {swapped_layers:g} layers need "
                f"{in_gigabytes(swapped_layers * always)} GB of host memory, but there are "
                f"{machine.host_bytes / 1e9:.4g}: give that, or use priced, which then keeps more on the device"
            )
        room = min(room, machine.host_bytes / swapped_layers)
    return min(1.0, max(0.0, (room - always) / others))


def plan_memo(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """Swap layer inputs, attention outputs and the fraction alpha of all other tensors; recompute the rest (MEMO).

    Raises:
        ValueError: see ``memo_alpha``.
    """
    alpha = memo_alpha(load, machine)
    return ActivationPlan("memo", alpha, 1.0 - alpha, 1.0, False, min(load.resident_layers, load.num_layers))


def plan_offload(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """Swap the smallest share of every tensor with which one micro-batch fits on the device; recompute nothing.

    Two layers stay whole, and (1 - r) of the others (ByteScale section 5.2, Eq. 3). The share may be too large to be
    copied during the forward pass; the forecast then shows the cost. The HDP planner's ``OffloadLimits`` never allow
    such a share.
    """
    resident = min(load.resident_layers, load.num_layers)
    if forecast(ActivationPlan("none"), load, machine).device_bytes <= machine.device_bytes:
        return ActivationPlan("offload")
    room = DeviceNeed.of(load, resident, moves=True).most_kept(machine.device_bytes)
    share = _share(1.0 - room / load.whole_bytes) if resident < load.num_layers else 0.0
    return ActivationPlan("offload", share, 0.0, share, False, resident if share else 0)


def plan_priced(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """Return the shares with the least predicted time.

    For a fixed number of resident layers, time is a convex and piecewise linear function of three shares under linear
    bounds. Its minimum is at an intersection of bounds, so all intersections are tried. Among equally fast plans, the
    plan that moves fewer bytes is chosen.

    Raises:
        ValueError: no shares fit. The message names the smallest host memory with which some shares fit.
    """
    return _chosen(priced_or_none, load, machine)


def priced_or_none(load: LayerLoad, machine: Machine) -> ActivationPlan | None:
    """Return the plan of ``plan_priced``, or None if no shares fit."""
    keeps_all = ActivationPlan("priced")
    if forecast(keeps_all, load, machine).fits(machine):  # others rebuild at least outputs of norms
        return keeps_all
    plans = []
    for resident in range(min(load.resident_layers, load.num_layers), load.num_layers):
        unmoved, moved = (DeviceNeed.of(load, resident, moves, products=True) for moves in (False, True))
        shares = *_unmoved(load, machine, unmoved), *_corners(load, machine, resident, moved)
        for input_swap, keep, swap in shares:
            plan = ActivationPlan("priced", swap, max(0.0, 1.0 - swap - keep), input_swap, True, resident)
            plans.append((forecast(plan, load, machine, moved if input_swap or swap else unmoved), plan))
    return _fastest(plans, machine)


def _unmoved(load: LayerLoad, machine: Machine, need: DeviceNeed) -> Iterable[tuple[float, float, float]]:
    """Yield (input swap, keep, swap) without transfers, if inputs fit; the device then holds one whole layer less."""
    inputs = load.bytes_of("input")
    room = need.most_kept(machine.device_bytes) - inputs
    if room >= -1e-9 * inputs:
        yield 0.0, _share(room / load.bytes_of(*PRODUCTS)), 0.0


def _corners(
    load: LayerLoad, machine: Machine, resident: int, need: DeviceNeed
) -> Iterable[tuple[float, float, float]]:
    """Yield (input swap, keep, swap) where two or more bounds meet, with ``resident`` layers kept whole."""
    room = need.most_kept(machine.device_bytes)
    if room < 0:
        return
    planned = load.times_held * (load.num_layers - resident)
    inputs, matrix = load.bytes_of("input"), load.bytes_of(*PRODUCTS)
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


def _fastest(plans: list[tuple[ActivationForecast, ActivationPlan]], machine: Machine) -> ActivationPlan | None:
    """Return the fitting plan with the least predicted time, then the least host memory, or None."""
    fitting = [(prediction, plan) for prediction, plan in plans if prediction.fits(machine)]
    if not fitting:
        return None
    return min(fitting, key=lambda candidate: (candidate[0].step_seconds, candidate[0].host_bytes))[1]


def _chosen(
    choose: Callable[[LayerLoad, Machine], ActivationPlan | None], load: LayerLoad, machine: Machine
) -> ActivationPlan:
    """Return the plan that ``choose`` finds. Raises ValueError, which names a sufficient budget, if it finds none."""
    plan = choose(load, machine)
    if plan is not None:
        return plan
    everything = load.times_held * load.num_layers * load.bytes_of()
    needed = least_budget(lambda size: choose(load, replace(machine, host_bytes=size)) is not None, everything)
    if needed is not None:
        remedy = f"it fits with {in_gigabytes(needed)} GB of host memory, or more device memory, or fewer tokens"
    else:
        ample = replace(machine, host_bytes=everything)
        most = forecast(ActivationPlan("none"), load, machine).device_bytes
        least = least_budget(lambda size: choose(load, replace(ample, device_bytes=size)) is not None, most) or most
        whole = in_gigabytes(least + machine.state_bytes)
        remedy = f"it takes {whole} GB of device memory even with enough host memory, or fewer tokens"
    states = f" and {machine.state_bytes / 1e9:.4g} GB of model states" if machine.state_bytes else ""
    raise ValueError(
        f"activations of {load.num_tokens} tokens{states} do not fit in "
        f"{(machine.device_bytes + machine.state_bytes) / 1e9:.4g} GB of device memory and "
        f"{machine.host_bytes / 1e9:.4g} GB of host memory: {remedy}"
    )


def least_budget(works: Callable[[float], bool], most: float) -> float | None:
    """Return the smallest budget in ``(0, most]`` that works, or slightly more; None if ``most`` does not work.

    ``works`` must be monotonic: if a budget works, every larger budget works too.
    """
    if not works(most):
        return None
    fails, precise = 0.0, 1e-6 * most
    while most - fails > max(1e-4 * most, precise):
        middle = (fails + most) / 2
        fails, most = (fails, middle) if works(middle) else (middle, most)
    return most


def in_gigabytes(num_bytes: float) -> str:
    """Return a budget in GB as text, rounded up so that the printed number is enough."""
    return f"{math.ceil(num_bytes / 1e6 - 1e-9) / 1e3:.3f}"


def plan_auto(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """Return the plan of the fitting policy with the least predicted time, then of the simplest policy.

    Raises:
        ValueError: no policy fits. The message names the smallest host memory with which some policy fits.
    """
    return _chosen(_auto, load, machine)


def _auto(load: LayerLoad, machine: Machine) -> ActivationPlan | None:
    """Return the plan of ``plan_auto``, or None if no policy fits."""
    plans = [ActivationPlan("none"), plan_offload(load, machine)]
    with contextlib.suppress(ValueError):  # this policy does not fit; other policies may
        plans.append(plan_memo(load, machine))
    priced = priced_or_none(load, machine)
    plans += [] if priced is None else [priced]
    return _fastest([(forecast(plan, load, machine), plan) for plan in plans], machine)


def given_plan(policy: str, swap: float | None, recompute: float | None, resident_layers: int) -> ActivationPlan:
    """Return the plan of a policy with given shares. At least one share is given; the other defaults to the rest.

    The policy "none" applies only the shares, to all tensors of all layers.
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
    """Return the checked plan of a policy by name. Raises ValueError for an unknown name, or if no plan fits."""
    if policy == "none":
        return ActivationPlan("none")
    makers = {"memo": plan_memo, "priced": plan_priced, "offload": plan_offload, "auto": plan_auto}
    if policy not in makers:
        raise ValueError(f"the activation policy {policy} is unknown; choose one of {', '.join(POLICIES)}")
    plan = makers[policy](load, machine)
    check_activation_plan(plan, load, machine, fits=policy in ("priced", "auto"))
    return plan
