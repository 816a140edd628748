"""Independent validator of memory plans. It shares no code with the placement."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, NoReturn

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.memory.plan import MemoryPlan, Request, TwoLevelPlan

_MAX_ROWS: Final = 40


def check_memory_plan(plan: MemoryPlan) -> None:
    """Raise PlanError unless the plan satisfies every rule.

    1. Each request has one address, not negative, and a positive size and life.
    2. Each address is a multiple of the largest number that divides all sizes, so blocks of whole granules start at
       granules.
    3. Requests that exist together share no memory.
    4. The bound is the peak of the bytes that exist together.
    5. A plan whose peak equals the bound is marked as optimal.

    The message holds the law and the printed requests (at most 40), with ``>>`` before each bad row.
    """
    if len(plan.addresses) != len(plan.requests):
        raise PlanError(f">> {len(plan.requests)} requests have {len(plan.addresses)} addresses")
    unit = math.gcd(*(request.num_bytes for request in plan.requests))
    for index, (request, address) in enumerate(zip(plan.requests, plan.addresses, strict=True)):
        if request.num_bytes < 1 or request.stop <= request.start:
            _fail(plan, f"{request.name} has no size or no life", [index])
        if address < 0:
            _fail(plan, f"{request.name} is at {address}", [index])
        if address % unit:
            _fail(plan, f"{request.name} is at {address}, not a multiple of {unit}", [index])
    bound = _check_disjoint(plan)
    if plan.bound != bound:
        _fail(plan, f"the liveness bound is {bound}, not {plan.bound}")
    if plan.peak == bound and not plan.is_optimal:
        _fail(plan, f"the peak equals the liveness bound {bound}, but the plan is not marked as optimal")


def _check_disjoint(plan: MemoryPlan) -> int:
    """Return the liveness bound, after comparing each request with all requests that exist when it starts."""
    most = total = 0
    alive: list[int] = []
    for index in sorted(range(len(plan.requests)), key=lambda i: plan.requests[i].start):
        begin, end = plan.addresses[index], plan.addresses[index] + plan.requests[index].num_bytes
        gone = [other for other in alive if plan.requests[other].stop <= plan.requests[index].start]
        if gone:
            total -= sum(plan.requests[number].num_bytes for number in gone)
            alive = [other for other in alive if plan.requests[other].stop > plan.requests[index].start]
        for other in alive:
            low, high = plan.addresses[other], plan.addresses[other] + plan.requests[other].num_bytes
            if begin < high and low < end:
                names = f"{plan.requests[other].name} and {plan.requests[index].name}"
                _fail(plan, f"{names} share memory at {max(begin, low)}", [other, index])
        alive.append(index)
        total += plan.requests[index].num_bytes
        most = max(most, total)
    return most


def check_two_level_plan(plan: TwoLevelPlan) -> None:
    """Raise PlanError unless both levels satisfy ``check_memory_plan``, and each pass fits in its block.

    A block of the model has the size of its level's peak, and exists as long as the level's requests.
    """
    for level in plan.levels.values():
        check_memory_plan(level)
    check_memory_plan(plan.model)
    for index, block in enumerate(plan.model.requests):
        words = block.name.split()
        if len(words) != 3 or words[0] != "layer" or not words[1].isdigit():
            continue
        if words[2] not in plan.levels:
            _fail(plan.model, f"{block.name} is the block of a pass without a plan", [index])
        level = plan.levels[words[2]]
        if block.num_bytes != level.peak:
            _fail(plan.model, f"{block.name} has {block.num_bytes} bytes, but its pass needs {level.peak}", [index])
        lives = max((request.stop for request in level.requests), default=0)
        if block.stop - block.start < lives:
            law = f"{block.name} exists for {block.stop - block.start} events, but its pass takes {lives}"
            _fail(plan.model, law, [index])


def check_covers(plan: TwoLevelPlan, requests: Sequence[Request]) -> None:
    """Replay a recorded step at the addresses of its plan. Raise PlanError unless it satisfies every rule.

    1. Each request of the step has one address, in a pass or in the model, at the recorded time and with the recorded
       size.
    2. Requests that exist together share no memory, even if they belong to different passes.
    3. The peak of the replay equals the planned peak.
    """
    recorded = {request.start: request for request in requests}
    if len(recorded) != len(requests):
        raise PlanError(">> two requests of the step begin at the same time")
    placed: list[tuple[Request, int]] = []
    for index, (block, base) in enumerate(zip(plan.model.requests, plan.model.addresses, strict=True)):
        words = block.name.split()
        level = plan.levels.get(words[2]) if len(words) == 3 and words[0] == "layer" else None
        parts = [(block, base, 0)]
        if level is not None:
            pairs = zip(level.requests, level.addresses, strict=True)
            parts = [(part, base + address, block.start) for part, address in pairs]
        for part, address, since in parts:
            request = recorded.pop(part.start + since, None)
            if request is None or (request.num_bytes, request.stop) != (part.num_bytes, part.stop + since):
                _fail(
                    plan.model, f"{part.name} of {block.name} is not in the step, or has another size or life", [index]
                )
            placed.append((request, address))
    if recorded:
        raise PlanError(f">> {next(iter(recorded.values())).name} of the step has no address")
    placed.sort(key=lambda pair: pair[0].start)
    whole = MemoryPlan(tuple(request for request, _ in placed), tuple(address for _, address in placed), 0, False)
    _check_disjoint(whole)
    if whole.peak != plan.model.peak:
        raise PlanError(f">> the step needs {whole.peak} bytes at its addresses, but {plan.model.peak} are planned")


def _fail(plan: MemoryPlan, law: str, marked: Collection[int] = ()) -> NoReturn:
    """Raise PlanError with rows of requests, including all ``marked`` rows. Without any, the heading is marked."""
    shown = sorted({*marked, *range(min(_MAX_ROWS, len(plan.requests)))})
    lines = [
        law if marked else f">> {law}",
        f"   {'request':32} {'bytes':>14} {'start':>8} {'stop':>8} {'address':>14}",
    ]
    for index in shown:
        request = plan.requests[index]
        lines.append(
            f"{'>>' if index in marked else '  '} {request.name:32} {request.num_bytes:14} {request.start:8} "
            f"{request.stop:8} {plan.addresses[index]:14}"
        )
    if len(shown) < len(plan.requests):
        lines.append(f"   and {len(plan.requests) - len(shown)} more")
    raise PlanError("\n".join(lines))
