"""Who chooses what is kept, swapped and recomputed: pure functions from a load and a machine to an ``ActivationPlan``.

- ``plan_memo``: MEMO's program. All tensors but two share one fraction alpha that is swapped, the rest is recomputed.
- ``plan_priced``: each tensor has a price, the seconds to rebuild it for each of its bytes. Outputs of norms and of the
  activation function are nearly free and are never swapped; outputs of matrix products are. Free device memory keeps.
- ``plan_offload``: ByteScale's selective offloading (Eq. 3): a share of everything is swapped, nothing recomputed.
- ``plan_auto``: the one of these, or none, that is predicted to be the fastest of those that fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from bytescale_ext.plan.activation import RESIDENT_LAYERS, ActivationPlan, LayerLoad, Machine, forecast

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
                f"{swapped_layers * always / 1e9:.4g} GB of host memory, and there are {machine.host_bytes / 1e9:.4g}; "
                "give more, or use priced, which keeps on the device what host memory does not hold"
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
    whole, and (1 - r) of the others (Eq. 3). The largest share that hides behind the forward pass is
    ``hidden_offload``; more than that is taken if memory asks for it, and the forecast shows its price.
    """
    resident = min(load.resident_layers, load.num_layers)
    planned = load.in_flight * (load.num_layers - resident)
    empty = forecast(ActivationPlan("offload", 1.0, 0.0, 1.0, False, resident), load, machine)
    room = machine.device_bytes - empty.device_bytes
    share = 1.0 - room / (planned * load.bytes_of()) if planned else 0.0
    share = min(1.0, max(0.0, share))
    return ActivationPlan("offload", share, 0.0, share, False, resident if share else 0)


def hidden_offload(load: LayerLoad, machine: Machine) -> float:
    """The largest share of a layer that is written to host memory while the next one computes (ByteScale Eq. 3)::

    T(s) >= r Act(s) / min(B_d2h, B_h2d),  0 <= r <= 1
    """
    return min(1.0, load.forward_seconds * machine.link_bytes_per_second / load.bytes_of())


def offload_width(length: int, tokens_per_rank: int, num_layers: int, offload: float) -> int:
    """D(s), the fewest ranks of a sequence when a share of its activations is in host memory (ByteScale Eq. 3)::

        D(s) = ceil((2 Act(s) + (1 - r) (l - 2) Act(s)) / (l Act(C)))

    with Act(s) in proportion to s. A rank without swapping holds C tokens.
    """
    whole = min(RESIDENT_LAYERS, num_layers)
    held = length * (whole + (1.0 - offload) * (num_layers - whole))
    return max(1, math.ceil(held / (num_layers * tokens_per_rank) - 1e-9))


def plan_priced(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """The shares of least predicted time: what is swapped, kept and recomputed of the tensors that have a price.

    With the number of layers that are kept whole fixed, time is a convex and piecewise linear function of three
    shares under linear bounds; so the least is where bounds meet, and all such points are tried. Ties go to the plan
    that moves less.

    Raises:
        ValueError: no shares fit.
    """
    fewest = min(load.resident_layers, load.num_layers)
    plans = [
        ActivationPlan("priced", swap, max(0.0, 1.0 - swap - keep), input_swap, True, resident)
        for resident in range(fewest, load.num_layers)
        for input_swap, keep, swap in _corners(load, machine, resident)
    ]
    return _fastest([*plans, ActivationPlan("priced")], load, machine)


def _corners(load: LayerLoad, machine: Machine, resident: int) -> Iterable[tuple[float, float, float]]:
    """(input swap, keep, swap) shares where two or more bounds meet, with ``resident`` layers kept whole."""
    planned = load.in_flight * (load.num_layers - resident)
    inputs, matrix = load.bytes_of("input"), load.bytes_of("matrix")
    nothing_kept = ActivationPlan("priced", 0.0, 1.0, 1.0, True, resident)
    room = (machine.device_bytes - forecast(nothing_kept, load, machine).device_bytes) / planned
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


def _fastest(plans: list[ActivationPlan], load: LayerLoad, machine: Machine) -> ActivationPlan:
    """The plan of least predicted time that fits. Raises ValueError if none does."""
    best: tuple[tuple[float, float], ActivationPlan] | None = None
    least = math.inf
    for plan in plans:
        prediction = forecast(plan, load, machine)
        key = (prediction.step_seconds, prediction.host_bytes)
        if prediction.host_bytes <= machine.host_bytes * (1 + 1e-9):
            least = min(least, prediction.device_bytes)
        if prediction.fits(machine) and (best is None or key < best[0]):
            best = key, plan
    if best is None:
        raise ValueError(
            f"activations of {load.num_tokens} tokens need {least / 1e9:.4g} GB of device memory, and there are "
            f"{machine.device_bytes / 1e9:.4g}, with {machine.host_bytes / 1e9:.4g} GB of host memory: give more of "
            "either, or fewer tokens"
        )
    return best[1]


def plan_auto(load: LayerLoad, machine: Machine) -> ActivationPlan:
    """The policy that is predicted to be the fastest of those that fit; ties go to the simplest.

    Raises:
        ValueError: none fits.
    """
    plans = [ActivationPlan("none"), plan_offload(load, machine)]
    for make in (plan_memo, plan_priced):
        try:
            plans.append(make(load, machine))
        except ValueError:
            continue  # this one does not fit; the others may
    return _fastest(plans, load, machine)


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
