from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import preload, run_ranks

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"rotary_interleaved": True},
    "interpolated": {"seq_len_interpolation_factor": 4},
    "half of the width": {"rotary_percent": 0.5},
    "another base": {"rotary_base": 500000},
    "llama-scaled": {"rope_scaling": True, "rope_scaling_factor": 8.0},
    "all": {"rotary_interleaved": True, "seq_len_interpolation_factor": 2.5, "rotary_percent": 0.25},
}


@pytest.fixture(scope="module", autouse=True)
def megatron_in_the_fork_server() -> None:
    preload("tests.e2e.preload")


def angles(rank: int, world: int, settings: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Megatron's angles of 300 positions, ours, and ours of positions in another order."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import DocumentRotaryEmbedding

    def make() -> Any:
        return RotaryEmbedding(16, **{"rotary_percent": 1.0, "use_cpu_initialization": True, **settings})

    ours, order = DocumentRotaryEmbedding(make()), torch.randperm(300)
    return make()(300), ours(torch.arange(300)), ours(order), order, ours(300)


@pytest.mark.parametrize("name", CASES)
def test_angles_are_megatrons(name: str) -> None:
    expected, in_order, permuted, order, by_length = run_ranks(angles, 1, CASES[name], init_group=False)[0]
    assert expected.shape == in_order.shape == (300, 1, 1, int(16 * CASES[name].get("rotary_percent", 1.0)))
    assert expected.abs().max() > 1
    torch.testing.assert_close(in_order, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(permuted, expected[order], rtol=1e-6, atol=1e-6)
    assert torch.equal(by_length, expected)


def lengths_asked(rank: int, world: int) -> tuple[Any, ...]:
    from types import SimpleNamespace

    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import DocumentRotaryEmbedding
    from megatron.bytescale.core.models.gpt.gpt_layer_specs import use_document_positions
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

    stock = RotaryEmbedding(16, 1.0, use_cpu_initialization=True)
    chunks = [torch.nn.Module(), torch.nn.Module()]
    chunks[0].rotary_pos_emb = stock
    use_document_positions(chunks)
    ours = chunks[0].rotary_pos_emb
    assert isinstance(ours, DocumentRotaryEmbedding) and ours.rotary is stock
    assert not hasattr(chunks[1], "rotary_pos_emb")
    positions = torch.tensor([0, 1, 0, 5])
    params = DocumentSeqParams(positions=positions, layout=None)
    config = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2, context_parallel_size=1)
    hidden = torch.zeros(7, 1, 4)
    return (
        ours.get_rotary_seq_len(None, None, hidden, config, params) is positions,
        ours.get_rotary_seq_len(None, None, hidden, config, None),
        stock.get_rotary_seq_len(None, None, hidden, config, None),
        [name for name, _ in ours.named_parameters()] + list(ours.state_dict()),
    )


def test_the_model_asks_for_positions_of_documents_and_for_lengths_otherwise() -> None:
    asked_positions, ours, stock, saved = run_ranks(lengths_asked, 1, init_group=False)[0]
    assert asked_positions
    assert ours == stock == 14
    assert saved == [], "checkpoints must not change"
