from __future__ import annotations

import torch

from bytescale_ext.activation.trace import GRANULE_BYTES, AllocationTrace
from bytescale_ext.plan.memory.placement import liveness_bound, requests_within


def test_sizes_and_lives_by_hand() -> None:
    weight = torch.ones(1024)
    trace = AllocationTrace([weight])
    with trace:
        a = weight * 2  # 4096 bytes
        b = a[:10] + 1  # a view of a is no request; 40 bytes become a granule
        weight.add_(1)  # in place, of what was there
        del a
        c = b * b
    requests = trace.requests()
    assert [r.num_bytes for r in requests] == [4096, GRANULE_BYTES, GRANULE_BYTES]
    first, second, third = requests
    assert first.overlaps(second)
    assert not first.overlaps(third)
    assert second.overlaps(third)
    assert liveness_bound(requests) == 4096 + GRANULE_BYTES
    assert c.numel() == 10


def test_a_backward_pass_is_seen() -> None:
    x = torch.ones(256, requires_grad=True)
    trace = AllocationTrace([x.detach()])
    with trace:
        trace.mark("forward")
        loss = (x.sin() * 3).sum()
        trace.mark("backward")
        loss.backward()
        trace.mark("end")
    requests = trace.requests()
    in_backward = requests_within(requests, trace.marks["backward"], trace.marks["end"])
    assert any("cos" in request.name for request in in_backward)
    assert not any("sin" in request.name for request in in_backward)
    assert [r.start for r in requests] == sorted(r.start for r in requests)
