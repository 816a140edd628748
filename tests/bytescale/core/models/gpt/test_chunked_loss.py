"""The chunked loss against the unchunked loss, on one rank, with a layer that counts existing logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.bytescale.core.models.gpt.chunked_loss import chunked_loss
from tests.bytescale.core.models.gpt.errors import relative_error
from tests.harness import run_ranks

ROWS, BATCH, HIDDEN, VOCAB = 11, 2, 4, 7


class Layer:
    """Output layer that records the rows of its calls."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        self.rows.append(hidden.shape[0])
        return hidden @ weight.T, None


def losses_of(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return losses [b, s] for labels [b, s] and logits [s, b, v], as in Megatron."""
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
    assert sorted(layer.rows) == sorted(2 * rows)  # recomputed, not kept
    torch.testing.assert_close(own_hidden.grad, hidden.grad)
    torch.testing.assert_close(own_weight.grad, weight.grad)


def long_case(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states [rows, 1, 32], a weight [48, 32] and labels [1, rows]."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, 1, 32, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(48, 32, generator=generator)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(48, (1, rows), generator=generator)


def in_chunks(num_tokens: int, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses."""
    return chunked_loss(
        num_tokens,
        hidden_states=hidden,
        output_layer=Layer(),
        output_weight=weight,
        labels=labels,
        runtime_gather_output=None,
        compute_language_model_loss=lambda labels, logits: losses_of(labels, logits.float()),
        scale_logits=lambda logits: logits,
    ).sum()


@pytest.fixture(scope="module")
def at_once() -> tuple[torch.Tensor, float]:
    """Return the exact gradient of the weight, and the error of the bf16 path without chunks."""
    hidden, weight, labels = long_case(1024, torch.bfloat16)
    losses_of(labels, (hidden @ weight.T).float()).sum().backward()
    rounded = weight.grad
    hidden, weight = hidden.detach(), weight.detach().double().requires_grad_()
    logits = (hidden @ weight.detach().bfloat16().T).double()  # rounded as above, so only the sum differs
    by_logits = torch.softmax(logits, 2).scatter_add(2, labels.T[:, :, None], torch.full((1024, 1, 1), -1.0).double())
    exact = by_logits.bfloat16().double().flatten(0, 1).T @ hidden.double().flatten(0, 1)
    assert rounded is not None
    return exact, relative_error(rounded, exact)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 4, 32, 1024])
def test_bf16_chunks_round_the_gradient_as_the_whole_does(num_tokens: int, at_once: tuple[torch.Tensor, float]) -> None:
    exact, error = at_once
    assert 0.001 < error < 0.003  # one rounding to 8 bits
    hidden, weight, labels = long_case(1024, torch.bfloat16)
    in_chunks(num_tokens, hidden, weight, labels).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert relative_error(weight.grad, exact) <= 1.05 * error


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_sum_goes_to_the_gradient_buffer_of_ddp(is_tied: bool, at_once: tuple[torch.Tensor, float]) -> None:
    hidden, weight, labels = long_case(1024, torch.bfloat16)
    weight.main_grad, weight.grad_added_to_main_grad = torch.full((48, 32), 2.0), False  # type: ignore[attr-defined]
    weight.zero_out_wgrad = is_tied  # type: ignore[attr-defined]
    buffer = weight.main_grad.data_ptr()  # type: ignore[attr-defined]
    in_chunks(16, hidden, weight, labels).backward()
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert weight.main_grad.data_ptr() == buffer  # type: ignore[attr-defined]
    assert relative_error(weight.main_grad - 2.0, at_once[0]) < 1e-5  # type: ignore[attr-defined]
    assert weight.grad is not None  # otherwise overlapped reductions would not start
    assert not is_tied or not weight.grad.any()  # DDP adds it to the embedding's


def test_a_buffer_in_host_memory_is_left_to_who_takes_gradients_there(at_once: tuple[torch.Tensor, float]) -> None:
    """The meta device replaces a second device."""
    hidden, weight, labels = long_case(1024, torch.bfloat16)
    weight.main_grad = torch.zeros(weight.shape, device="meta")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    in_chunks(16, hidden, weight, labels).backward()
    assert not weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert weight.grad is not None
    assert relative_error(weight.grad, at_once[0]) <= 1.05 * at_once[1]


def test_frozen_weights_and_hidden_states_get_no_gradient() -> None:
    hidden, weight, labels = long_case(64, torch.float32)
    in_chunks(16, hidden, weight.detach(), labels).backward()
    expected = hidden.grad
    hidden.grad = None
    in_chunks(16, hidden, weight, labels).backward()
    assert torch.equal(hidden.grad, expected)
    expected, weight.grad = weight.grad, None
    in_chunks(16, hidden.detach(), weight, labels).backward()
    assert torch.equal(weight.grad, expected)


class ParallelCase:
    """Run Megatron's output layer and loss on tensor-parallel ranks, whole or in chunks.

    In bf16 Megatron adds the weight's gradient to its buffer by a fused kernel, which is replaced here.
    """

    def __init__(self, rank: int, world: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer import TransformerConfig

        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=lambda inputs, grads, total: total.add_(grads.float().T @ inputs.float())
        )
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, params_dtype=dtype, use_cpu_initialization=True,
            tensor_model_parallel_size=world, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=False,
        )  # fmt: skip
        torch.manual_seed(2)
        self.layer = layers.ColumnParallelLinear(
            32, 64, config=config, init_method=torch.nn.init.normal_, bias=False, gather_output=False
        )
        self.is_fused = self.layer.gradient_accumulation_fusion = dtype == torch.bfloat16
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(24, 2, 32, generator=generator).to(dtype)
        self.hidden = hidden.chunk(world)[rank].contiguous() if sequence_parallel else hidden
        self.labels = torch.randint(64, (2, 24), generator=generator)

    @staticmethod
    def loss_of(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

        return vocab_parallel_cross_entropy(logits, labels.T.contiguous()).T.contiguous()

    def run(self, num_tokens: int | None) -> list[torch.Tensor]:
        """Return losses [2, 24], and gradients of the hidden states and of the weight."""
        hidden, weight = self.hidden.clone().requires_grad_(), self.layer.weight
        weight.grad = None
        if self.is_fused:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        if num_tokens is None:
            losses = self.loss_of(self.labels, self.layer(hidden)[0])
        else:
            losses = chunked_loss(
                num_tokens, hidden_states=hidden, output_layer=self.layer, output_weight=None, labels=self.labels,
                runtime_gather_output=None, compute_language_model_loss=self.loss_of, scale_logits=torch.clone,
            )  # fmt: skip
        (losses.double() * torch.arange(48).view(2, 24)).sum().backward()
        assert hidden.grad is not None
        return [losses.detach(), hidden.grad, weight.main_grad if self.is_fused else weight.grad]


def run_tensor_parallel(rank: int, world: int, sequence_parallel: bool) -> list[list[float]]:
    """Return relative differences between chunks and Megatron's own path, in bf16 and in fp64."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(world)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        case = ParallelCase(rank, world, sequence_parallel, dtype)
        pairs = zip(case.run(10), case.run(None), strict=True)
        found.append([relative_error(one, other.double()) for one, other in pairs])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_and_fused_gradients(sequence_parallel: bool) -> None:
    for half, double in run_ranks(run_tensor_parallel, 2, sequence_parallel):
        assert max(double) < 1e-14
        assert half[0] < 1e-6
        assert half[1] < 4e-3
        assert half[2] < 1e-5
