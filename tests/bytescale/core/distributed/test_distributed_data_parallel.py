"""Parameters in host memory train like parameters on the device. tests/e2e/states tests whole runs."""

from __future__ import annotations

import math

import pytest
import torch

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.states.node_memory import HostBlocks
from megatron.bytescale.core.distributed.distributed_data_parallel import move_states
from tests.bytescale.core.distributed.chunks import WIDTH, chunk_of
from tests.bytescale.core.distributed.test_param_and_grad_buffer import SLOT_BYTES, TOKENS

CONFIG = StateConfig(4096, math.inf, stage=3, window_layers=2)
LAYER_BYTES = 2 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("shares", [True, False])
def test_stage_3_computes_the_same_through_a_window(shares: bool) -> None:
    chunk, plain = chunk_of(shares=shares), chunk_of(shares=shares)
    gradients = move_states([chunk], CONFIG, HostBlocks(shares=False, on_cuda=False), on_cuda=False)
    [window] = gradients.windows
    assert window.device_bytes == 0
    loss, expected = chunk.module(TOKENS), plain.module(TOKENS)
    assert window.device_bytes == 2 * LAYER_BYTES + 2 * 6 * WIDTH  # two layers and the embedding
    for one in (loss, expected):
        one.backward()
    assert torch.equal(loss, expected)
    chunk.bucket_groups[0].finish_grad_sync()
    assert window.device_bytes == 0
    for found, other in zip(chunk.module.parameters(), plain.module.parameters(), strict=True):
        assert other.grad is not None
        assert torch.equal(found.main_grad, other.grad.float())
        assert torch.equal(found.data, other.data)
    buffer = chunk.buffers[0]
    if shares:  # the optimizer writes to shards of the buffer, then ranks gather them
        buffer.param_data.fill_(2.0)
        chunk.bucket_groups[0].start_param_sync()
        assert chunk.bucket_groups[0].param_gather_dispatched
        assert all(torch.all(bucket.param_data == 2.0) for bucket in buffer.buckets)
        assert all(torch.all(one == 2.0) for one in chunk.module.parameters())
    else:
        assert buffer.param_data is None
    assert gradients.host_bytes == SLOT_BYTES + (4 + 2) * buffer.numel
