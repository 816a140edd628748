"""The loss by chunks against the loss at once, on one rank, with a layer that shows how many logits exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.bytescale.core.models.gpt.chunked_loss import chunked_loss, use_chunked_loss

ROWS, BATCH, HIDDEN, VOCAB = 11, 2, 4, 7


class Layer:
    """An output layer that remembers the rows of its calls."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        self.rows.append(hidden.shape[0])
        return hidden @ weight.T, None


def losses_of(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[b, s] from labels [b, s] and logits [s, b, v], as Megatron's loss has them."""
    return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, BATCH, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(VOCAB, (BATCH, ROWS), generator=generator)


def run(num_tokens: int, labels: bool = True) -> tuple[torch.Tensor, Layer, torch.Tensor, torch.Tensor]:
    hidden, weight, wanted = tensors()
    layer = Layer()
    result = chunked_loss(
        num_tokens,
        hidden_states=hidden,
        output_layer=layer,
        output_weight=weight,
        labels=wanted if labels else None,
        runtime_gather_output=None,
        compute_language_model_loss=losses_of,
        scale_logits=lambda logits: 3.0 * logits,
        anything_else_of_megatron=1,
    )
    return result, layer, hidden, weight


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(1, [1] * 11), (2, [1] * 11), (6, [3, 3, 3, 2]), (10, [5, 5, 1]), (22, [11]), (1000, [11])],
)
def test_losses_and_gradients_are_those_at_once(num_tokens: int, rows: list[int]) -> None:
    hidden, weight, labels = tensors()
    expected = losses_of(labels, 3.0 * (hidden @ weight.T))
    expected.square().sum().backward()
    losses, layer, own_hidden, own_weight = run(num_tokens)
    assert layer.rows == rows
    torch.testing.assert_close(losses, expected)
    losses.square().sum().backward()
    assert sorted(layer.rows) == sorted(2 * rows)  # computed again, not kept
    torch.testing.assert_close(own_hidden.grad, hidden.grad)
    torch.testing.assert_close(own_weight.grad, weight.grad)


def test_without_labels_the_logits_come_at_once() -> None:
    logits, layer, hidden, weight = run(3, labels=False)
    assert layer.rows == [ROWS]
    torch.testing.assert_close(logits, 3.0 * (hidden @ weight.T).transpose(0, 1))


def test_only_the_chunk_with_the_output_layer_is_changed() -> None:
    class Chunk(torch.nn.Module):
        def __init__(self, post_process: bool) -> None:
            super().__init__()
            self.post_process = post_process

        def forward(self, **given: Any) -> dict[str, Any]:
            return given

    first, last = use_chunked_loss(5, [Chunk(False), Chunk(True)])
    assert first() == {}
    assert set(last()) == {"output_processor"}
