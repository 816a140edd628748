"""Independent validator of activation plans. It shares no code with the policies and the forecast."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NoReturn

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.activation.load import HeldSlices, LayerLoad, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan

_SLACK: Final = 1 + 1e-9


def check_activation_plan(plan: ActivationPlan, load: LayerLoad, machine: Machine, fits: bool = False) -> None:
    """Raise PlanError unless the plan satisfies every rule on this load and machine.

    1. The shares of each tensor are between 0 and 1 and sum to 1.
    2. The layer input, the tensors of attention and all other tensors of kind "input" are never recomputed.
    3. The last ``load.resident_layers`` layers stay whole, unless nothing is swapped or recomputed; a rank has no more
       resident layers than layers.
    4. A policy keeps its form: "none" keeps everything; "memo" swaps every input and keeps nothing else; "priced"
       rebuilds what is cheap; "offload" swaps one share of every tensor and recomputes nothing.
    5. What "memo" swaps of one layer, beyond inputs, is copied while one layer runs forward.
    6. Swapped layers fit in host memory (checked for "memo", and with ``fits``).
    7. Activations fit in device memory (checked with ``fits``).

    The message contains the violated rule and the printed plan, with ``>>`` before the invalid rows.

    Args:
        plan: plan of the micro-batch.
        load: load of the micro-batch.
        machine: memory and link of the plan.
        fits: whether the policy promises that the plan fits both budgets.
    """
    _check_shares(plan, load)
    _check_resident(plan, load)
    _check_policy(plan, load)
    swapped, kept = (load.num_tokens * sum(plan.shares(tensor)[i] * tensor.bytes_per_token for tensor in load.tensors)
                     for i in (0, 1))  # fmt: skip
    _check_hidden(plan, load, machine, swapped)
    host = _times(load) * _planned_layers(plan, load) * swapped
    if (fits or plan.policy == "memo") and host > machine.host_bytes * _SLACK:
        _fail(
            plan, load, f"swapped layers take {host:.6g} bytes of host memory, but there are {machine.host_bytes:.6g}"
        )
    moments = load.slices or (HeldSlices(load.num_tokens, load.in_flight * load.num_tokens, 0.0),)
    device = max(_device_peak(plan, load, kept, moment, moves=swapped > 0) for moment in moments)
    if fits and device > machine.device_bytes * _SLACK:
        law = f"activations take {device:.6g} bytes of device memory, but there are {machine.device_bytes:.6g}"
        _fail(plan, load, law)


def _fail(plan: ActivationPlan, load: LayerLoad, law: str, marked: Collection[int] = ()) -> NoReturn:
    """Raise PlanError with a row for each tensor. ``marked``: rows to mark; without any, the heading is marked."""
    lines = [law if marked else f">> {law}", f"   {'tensor':26} {'kind':8} {'swapped':>8} {'kept':>8} {'rebuilt':>8}"]
    for index, tensor in enumerate(load.tensors):
        shares = " ".join(f"{share:8.4f}" for share in plan.shares(tensor))
        lines.append(f"{'>>' if index in marked else '  '} {tensor.name:26} {tensor.kind:8} {shares}")
    lines.append(
        f"   policy {plan.policy}, {plan.resident_layers} of {load.num_layers} layers resident, {load.in_flight} "
        f"micro-batches of {load.num_tokens} tokens in flight"
    )
    raise PlanError("\n".join(lines))


def _times(load: LayerLoad) -> float:
    """Return the tokens in flight over the tokens of this micro-batch or slice."""
    return max((held.tokens / load.num_tokens for held in load.slices), default=load.in_flight)


def _planned_layers(plan: ActivationPlan, load: LayerLoad) -> int:
    """Return the number of layers that the plan swaps or recomputes."""
    return 0 if plan.is_off else load.num_layers - plan.resident_layers


def _check_shares(plan: ActivationPlan, load: LayerLoad) -> None:
    for index, tensor in enumerate(load.tensors):
        shares = plan.shares(tensor)
        if not all(0.0 <= share <= 1.0 for share in shares):
            _fail(plan, load, f"a share of {tensor.name} is outside 0 to 1", [index])
        if abs(sum(shares) - 1.0) > 1e-9:
            _fail(plan, load, f"the shares of {tensor.name} sum to {sum(shares):.6g}", [index])
        is_input = index == 0 or tensor.kind == "input" or tensor.name.startswith("attention ")
        if is_input and shares[2]:
            _fail(plan, load, f"{tensor.name} is recomputed, which needs attention or another layer", [index])


def _check_resident(plan: ActivationPlan, load: LayerLoad) -> None:
    fewest = 0 if plan.is_off else min(load.resident_layers, load.num_layers)
    if plan.policy != "shares" and plan.resident_layers < fewest:
        _fail(plan, load, f"{plan.resident_layers} layers are resident; at least the last {fewest} must be")
    if not 0 <= plan.resident_layers <= load.num_layers:
        _fail(plan, load, f"{plan.resident_layers} layers are resident, but the rank has {load.num_layers}")


def _check_policy(plan: ActivationPlan, load: LayerLoad) -> None:
    """Check rule 4, which differs for each policy."""
    is_kept = plan.policy in ("memo", "priced", "offload") and plan.is_off
    forms = {
        "none": (plan.is_off, "none keeps everything"),
        "memo": (
            plan.input_swap == 1.0 and not plan.rebuild_cheap and abs(plan.swap + plan.recompute - 1.0) <= 1e-9,
            "memo swaps every input, and swaps or recomputes all of the rest",
        ),
        "priced": (plan.rebuild_cheap, "priced rebuilds what is cheap"),
        "offload": (
            plan.swap == plan.input_swap and not plan.recompute and not plan.rebuild_cheap,
            "offload swaps one share of every tensor and recomputes nothing",
        ),
        "shares": (True, ""),
    }
    keeps_form, law = forms.get(plan.policy, (False, f"the policy {plan.policy} is unknown"))
    if not keeps_form and not is_kept:
        _fail(plan, load, law)


def _check_hidden(plan: ActivationPlan, load: LayerLoad, machine: Machine, swapped: float) -> None:
    seconds = swapped / machine.link_bytes_per_second
    if plan.policy == "memo" and plan.swap and seconds > load.forward_seconds * _SLACK:
        _fail(
            plan,
            load,
            f"the copy of a layer takes {seconds:.6g} s, but the next layer's forward pass takes "
            f"{load.forward_seconds:.6g} s",
        )


def _device_peak(plan: ActivationPlan, load: LayerLoad, kept: float, moment: HeldSlices, moves: bool) -> float:
    """Return the peak bytes on the device, by walking through the loss and the backward pass layer by layer.

    A planned layer stores ``kept`` bytes, and a resident layer stores all its tensors. A layer is whole during its
    backward pass. The next layer to run backward is whole too if its tensors are being read back. After the first layer
    of a micro-batch, the next layer is the last layer of another micro-batch, which stays whole while a further
    micro-batch runs forward. With slices, every layer also stores keys and their gradient sums, which are not tensors
    of the plan.
    """
    planned, share = _planned_layers(plan, load), moment.running / load.num_tokens
    kept *= share
    whole = moment.running * sum(tensor.bytes_per_token for tensor in load.tensors if tensor.kind != "key")
    parts = sum(tensor.bytes_per_token for tensor in load.tensors if tensor.kind == "view")
    read_back = whole - (0.0 if plan.rebuild_cheap else moment.running * parts)
    cheap = sum(tensor.bytes_per_token for tensor in load.tensors if tensor.kind == "cheap")
    ahead = whole - moment.running * cheap if plan.rebuild_cheap else read_back
    held = [kept] * planned + [whole] * (load.num_layers - planned)
    whole_heads = [tensor for tensor in load.tensors if tensor.name in ("query", "key, value") and tensor.kind != "key"]
    of_heads = sum(tensor.bytes_per_token for tensor in whole_heads)
    widest = max(of_heads, *(tensor.bytes_per_token for tensor in load.tensors))
    gradients = moment.running * (widest + 2 * load.tensors[0].bytes_per_token)
    if moment.gathered:
        gradients = max(gradients, moment.gathered + 3 * moment.running * load.tensors[0].bytes_per_token)
    rebuilt = 0.0  # rebuilt rows are separate tensors first, if only some rows are rebuilt
    if 0.0 < plan.recompute < 1.0 and not plan.rebuild_cheap:
        others = sum(tensor.bytes_per_token for tensor in load.tensors if tensor.kind not in ("input", "key", "view"))
        rebuilt = plan.recompute * moment.running * others
    now = moment.tokens / moment.running * sum(held) + load.num_layers * moment.bytes
    no_resident = planned == load.num_layers
    reads_ahead = moves and no_resident and load.in_flight > 1
    still_writing = ahead - kept if moves and no_resident else 0.0
    peak = now + still_writing + (ahead - kept if reads_ahead else 0.0) + max(gradients, load.head_bytes)
    for layer in reversed(range(load.num_layers)):
        extra = gradients
        if layer < planned:
            reading = ahead - kept if (moves and layer) or reads_ahead else 0.0
            extra = read_back - kept + reading + max(gradients, rebuilt)
        peak = max(peak, now + extra)
        now -= held[layer]
    return peak
