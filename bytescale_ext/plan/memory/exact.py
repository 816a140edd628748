"""Better memory placements, or a proof that none exists, by the CP-SAT solver of OR-tools."""

from __future__ import annotations

import math

from bytescale_ext.plan.memory.check import check_memory_plan
from bytescale_ext.plan.memory.plan import MemoryPlan


def improve(plan: MemoryPlan, seconds: float = 10.0) -> MemoryPlan:
    """Return the plan with a lower peak, or marked as optimal, if the solver achieves that in ``seconds``.

    This is the offline dynamic storage allocation of MEMO section 4.2: rectangles of time and memory that must not
    overlap. The given plan is the first solution; its peak and the liveness bound enclose the optimum. The solver runs
    in one thread, so equal plans give equal results unless time runs out.

    Raises:
        ValueError: OR-tools is not installed.
    """
    if plan.is_optimal or not plan.requests:
        return plan
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ValueError("proving a memory plan needs OR-tools: pip install ortools") from None
    unit = math.gcd(*(request.num_bytes for request in plan.requests))  # addresses stay multiples of this
    sizes, top = [request.num_bytes // unit for request in plan.requests], plan.peak // unit
    model = cp_model.CpModel()
    peak = model.new_int_var(plan.bound // unit, top, "peak")
    times, spaces, starts = [], [], []
    for request, size, address in zip(plan.requests, sizes, plan.addresses, strict=True):
        start = model.new_int_var(0, top - size, request.name)
        model.add_hint(start, address // unit)
        model.add(start + size <= peak)
        starts.append(start)
        spaces.append(model.new_fixed_size_interval_var(start, size, request.name))
        times.append(model.new_fixed_size_interval_var(request.start, request.stop - request.start, request.name))
    model.add_no_overlap_2d(times, spaces)
    model.add_cumulative(times, sizes, peak)
    model.minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return plan
    addresses = tuple(unit * int(solver.value(start)) for start in starts)
    better = MemoryPlan(plan.requests, addresses, plan.bound, status == cp_model.OPTIMAL)
    check_memory_plan(better)
    return better
