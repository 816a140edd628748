from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"rotary_interleaved": True},
    "interpolated": {"seq_len_interpolation_factor": 4},
    "half of the width": {"rotary_percent": 0.5},
    "another base": {"rotary_base": 500000},
    "llama-scaled": {"rope_scaling": True, "rope_scaling_factor": 8.0},
    "all": {"rotary_interleaved": True, "seq_len_interpolation_factor": 2.5, "rotary_percent": 0.25},
}


def angles(rank: int, world: int, settings: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return Megatron's angles of 300 positions, our angles, and our angles of permuted positions."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles

    def make() -> Any:
        return RotaryEmbedding(16, **{"rotary_percent": 1.0, "use_cpu_initialization": True, **settings})

    order = torch.randperm(300)
    return make()(300), document_angles(make(), torch.arange(300)), document_angles(make(), order), order


def angles_of_yarn(rank: int, world: int) -> tuple[Any, ...]:
    """Return Megatron's YaRN and plain RoPE angles of 300 positions, and our YaRN angles of permuted positions."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles

    def make() -> Any:
        sizes = {"scaling_factor": 8.0, "original_max_position_embeddings": 64}
        return YarnRotaryEmbedding(16, use_cpu_initialization=True, **sizes)

    order = torch.randperm(300)
    return (
        make()(300)[0],
        RotaryEmbedding(16, 1.0, use_cpu_initialization=True)(300),
        document_angles(make(), order),
        order,
    )


def test_angles_of_yarn_are_megatrons() -> None:
    expected, plain, permuted, order = run_ranks(angles_of_yarn, 1, init_group=False)[0]
    assert permuted.shape == (300, 1, 1, 16)
    torch.testing.assert_close(permuted, expected[order], rtol=1e-6, atol=1e-6)
    assert (expected - plain).abs().max() > 1


@pytest.mark.parametrize("name", CASES)
def test_angles_are_megatrons(name: str) -> None:
    expected, in_order, permuted, order = run_ranks(angles, 1, CASES[name], init_group=False)[0]
    assert expected.shape == in_order.shape == (300, 1, 1, int(16 * CASES[name].get("rotary_percent", 1.0)))
    assert expected.abs().max() > 1
    torch.testing.assert_close(in_order, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(permuted, expected[order], rtol=1e-6, atol=1e-6)


def given_to_the_decoder(rank: int, world: int) -> tuple[Any, ...]:
    """Return the angles that reach the decoder of a Megatron model: with documents, and without."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import (
        document_angles,
        use_document_positions,
    )
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, use_cpu_initialization=True)
    model = GPTModel(config, get_gpt_layer_local_spec(), 32, 8, position_embedding_type="rope")
    saved = list(model.state_dict())
    other = torch.nn.Module()
    assert use_document_positions([model, other]) == [model, other]
    assert list(model.state_dict()) == saved, "checkpoints must not change"
    seen: list[torch.Tensor] = []

    def stop(decoder: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["rotary_pos_emb"])
        raise InterruptedError

    model.decoder.register_forward_pre_hook(stop, with_kwargs=True)
    positions = torch.tensor([0, 1, 0, 5])
    for params in (DocumentSeqParams(positions=positions), None):
        with pytest.raises(InterruptedError):
            model(positions[None], positions[None], None, packed_seq_params=params)
    return *seen, document_angles(model.rotary_pos_emb, positions), model.rotary_pos_emb(4)


def test_the_decoder_gets_angles_of_documents_and_megatrons_without_them() -> None:
    documents, rows, expected, stock = run_ranks(given_to_the_decoder, 1)[0]
    assert torch.equal(documents, expected)
    assert documents.shape == (4, 1, 1, 16)
    assert torch.equal(rows, stock)
    assert not torch.equal(documents, rows)
