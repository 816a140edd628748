from __future__ import annotations

import itertools

import torch

from bytescale_ext.activation.trace import GRANULE_BYTES, AllocationTrace, watch_passes
from bytescale_ext.plan.memory.placement import liveness_bound


def test_sizes_and_lives_by_hand() -> None:
    weight = torch.ones(1024)
    trace = AllocationTrace([weight])
    with trace:
        a = weight * 2  # 4096 bytes
        b = a[:10] + 1  # a view of a is not a request; 40 bytes are rounded up to a granule
        weight.add_(1)  # in place, so no new request
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


class Double(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden_states.sin() * 2, None


def test_passes_of_layers_follow_each_other() -> None:
    layers, traces = [Double(), Double()], []
    for number, layer in enumerate(layers):
        watch_passes(layer, number, lambda: traces[0] if traces else None)
    x = torch.ones(64, requires_grad=True)

    def step() -> None:
        hidden = x * 1
        for layer in layers:
            hidden, _ = layer(hidden_states=hidden)
        hidden.sum().backward()

    step()  # before a trace runs, nothing is recorded
    traces.append(AllocationTrace([x.detach()]))
    with traces[0]:
        step()
        step()
    passes = traces[0].passes
    assert [(one.kind, one.layer) for one in passes] == 2 * [
        ("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0),
    ]  # fmt: skip
    assert all(one.start < one.stop <= other.start for one, other in itertools.pairwise(passes))


def test_what_was_received_before_is_a_request() -> None:
    received = torch.ones(1024)
    trace = AllocationTrace([])
    with trace:
        trace.note_input(received)
        trace.note_input(received)
        received.mul_(2)
        del received
    assert [(one.name, one.num_bytes) for one in trace.requests()] == [("0 received", 4096)]
    assert trace.requests()[0].stop == 1
