"""Buffers that count or sum keep their original type."""

from __future__ import annotations

import torch

from megatron.bytescale.training.buffer_types import BufferTypes


class Counter(torch.nn.Module):
    """Module with counts in float32 and int64, and a parameter and a buffer in the type of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("total", torch.tensor([0.1, 4097.0]), persistent=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("sink", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.tensor([0.3]))


def test_a_converted_buffer_gets_its_type_and_value_back() -> None:
    model, types = torch.nn.Sequential(Counter()), BufferTypes()
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    saved = set(model.state_dict())
    types.note([model])
    model.bfloat16()
    assert model[0].total.dtype == torch.bfloat16
    assert types.restore([model]) == [model]
    restored = dict(model.named_buffers())
    assert {name: buffer.dtype for name, buffer in restored.items()} == {
        name: buffer.dtype for name, buffer in expected.items()
    }
    assert all(torch.equal(buffer, expected[name]) for name, buffer in restored.items())
    assert set(model.state_dict()) == saved
    assert model[0].weight.dtype == torch.bfloat16


def test_a_sum_no_longer_stops() -> None:
    """In bfloat16 4,096 + 1 is 4,096."""
    model, types = Counter(), BufferTypes()
    types.note([model])
    types.restore([model.bfloat16()])
    model.total += 4096
    model.total += 1
    assert model.total[0] == torch.tensor(0.1) + 4096 + 1


def test_buffers_without_memory_get_their_type_alone() -> None:
    with torch.device("meta"):
        model = Counter()
    types = BufferTypes()
    types.note([model])
    types.restore([model.bfloat16()])
    assert (model.total.dtype, model.total.device.type) == (torch.float32, "meta")
