"""Proof that a placement of memory is the best, or a better one, by the CP-SAT solver of OR-tools."""

from __future__ import annotations

from bytescale_ext.plan.memory import MemoryPlan, check_memory_plan


def improve(plan: MemoryPlan, seconds: float = 10.0) -> MemoryPlan:
    """The plan, with a lower peak or a proof where the solver finds one in its time.

    The offline dynamic storage allocation of MEMO section 4.2 as rectangles of time and memory that must not overlap;
    the given plan is the first solution, and its peak and the liveness bound enclose the peak. One thread, so equal
    plans give equal results but for the time limit.

    Raises:
        ValueError: OR-tools is not installed.
    """
    if plan.is_optimal or not plan.requests:
        return plan
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ValueError("proving a memory plan needs OR-tools: pip install ortools") from None
    model = cp_model.CpModel()
    peak = model.new_int_var(plan.bound, plan.peak, "peak")
    times, spaces, starts = [], [], []
    for request, address in zip(plan.requests, plan.addresses, strict=True):
        start = model.new_int_var(0, plan.peak - request.num_bytes, request.name)
        model.add_hint(start, address)
        model.add(start + request.num_bytes <= peak)
        starts.append(start)
        spaces.append(model.new_fixed_size_interval_var(start, request.num_bytes, request.name))
        times.append(model.new_fixed_size_interval_var(request.start, request.stop - request.start, request.name))
    model.add_no_overlap_2d(times, spaces)
    model.add_cumulative(times, [request.num_bytes for request in plan.requests], peak)
    model.minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return plan
    addresses = tuple(int(solver.value(start)) for start in starts)
    better = MemoryPlan(plan.requests, addresses, plan.bound, status == cp_model.OPTIMAL)
    check_memory_plan(better)
    return better
