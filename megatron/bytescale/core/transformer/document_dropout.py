"""Dropout and jitter that depend on the document and the position, not on the rank.

Megatron draws masks from the random state of a process. Data-parallel ranks begin with equal states, so that they, and
the parts of a document in a ring, would draw equal masks. Here a mask is a hash of the seed, the step, the layer, the
document in the step, the position and the column (``token_noise.py``). One process draws the same masks as many, and a
resumed run goes on with the masks that it would have had. No mask is stored: the backward pass and recomputed layers
hash it again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.bytescale.arguments.options import current
from megatron.bytescale.arguments.running import Dropout, running_step
from megatron.bytescale.core.models.gpt.trunk import HEADS
from megatron.bytescale.core.transformer.token_noise import keep_mask, numbers_of_documents, uniform_noise

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from bytescale_ext.data.samples.packed import PackedMicroBatch
    from megatron.bytescale.runtime import Runtime

_OTHER_LAYERS: Final = ("mtp", HEADS)
"""Parts of a model whose layers have numbers that the decoder's layers have too."""

Added = tuple[torch.Tensor, torch.Tensor | None]
"""Output of attention or of an MLP, [rows, b, h], and its bias."""


def uses_noise(config: TransformerConfig) -> bool:
    """Return whether a model draws masks or jitter while it trains."""
    return config.hidden_dropout > 0 or bool(config.moe_input_jitter_eps)


def number_tokens(
    runtime: Runtime, packed: PackedMicroBatch, config: TransformerConfig
) -> Callable[[torch.Tensor], None]:
    """Number this rank's rows [rows] of a pass; return a hook of its output that does so before the backward pass.

    Sequence-parallel ranks share the rows.
    """
    numbers = numbers_of_documents(packed)[:, 0]
    if config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        numbers = numbers.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    numbers = runtime.step.token_numbers = numbers.to(runtime.device)

    def before_backward(_: torch.Tensor) -> None:
        runtime.step.token_numbers = numbers

    return before_backward


def numbers_of_rows(runtime: Runtime, num_rows: int) -> torch.Tensor:
    """Return the numbers [num_rows] of this rank's rows, or of its last rows if a policy recomputes only these."""
    numbers = runtime.step.token_numbers
    assert numbers is not None and len(numbers) >= num_rows, f"no pass has numbered {num_rows} rows"
    return numbers[len(numbers) - num_rows :]


def jitter(runtime: Runtime, layer: int | None, shape: torch.Size, eps: float) -> torch.Tensor:
    """Return noise that is uniform in ``1 +- eps`` for hidden states of ``shape`` [rows, 1, h], in that shape."""
    salt = (current(Dropout).seed, zlib.crc32(f"jitter {layer}".encode()), running_step())
    return 1.0 + eps * (2.0 * uniform_noise(numbers_of_rows(runtime, shape[0]), shape[2], salt) - 1.0)[:, None]


@dataclass(frozen=True)
class DocumentDropout:
    """Dropout at one place of a model.

    Attributes:
        runtime: state of the process.
        place: name of the place; another place draws other masks.
        drop: share of hidden states that become 0 while the model trains.
        seed: seed of the run.
    """

    runtime: Runtime
    place: str
    drop: float
    seed: int

    def __call__(self, hidden: torch.Tensor, is_training: bool) -> torch.Tensor:
        """Drop hidden states [rows, 1, h], and scale the others by ``1 / (1 - drop)``."""
        if not is_training or not self.drop:
            return hidden
        tokens = numbers_of_rows(self.runtime, hidden.shape[0])
        salt = (self.seed, zlib.crc32(self.place.encode()), running_step())
        masked = partial(_masked, tokens=tokens, drop=self.drop, salt=salt)
        return _WithoutMask.apply(hidden, masked)  # type: ignore[no-any-return, no-untyped-call]


def _masked(values: torch.Tensor, tokens: torch.Tensor, drop: float, salt: tuple[int, ...]) -> torch.Tensor:
    """Return ``values`` [rows, 1, h] of ``tokens`` [rows], dropped or scaled."""
    kept = keep_mask(tokens, values.shape[-1], drop, salt)
    return values.masked_fill(~kept[:, None], 0.0) / (1.0 - drop)


class _WithoutMask(torch.autograd.Function):
    """A product with a mask, which is computed again for the gradient instead of being stored."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, masked: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return ``masked(values)``, in the shape of ``values`` [rows, 1, h]."""
        ctx.masked = masked
        return masked(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Return the gradient of the values, [rows, 1, h]."""
        return ctx.masked(gradient), None


def use_document_dropout(runtime: Runtime, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """``ModelConfig.post_wrap_hooks``: drop hidden states of embeddings and layers by document and position."""
    settings = current(Dropout)
    place = partial(DocumentDropout, runtime, seed=settings.seed)
    for chunk in model_chunks if settings.hidden_dropout else ():
        for name, module in list(chunk.named_modules()):
            if isinstance(module, TransformerLayer):
                kind = next((part for part in _OTHER_LAYERS if part in name), "decoder")
                for site in ("self_attn_bda", "mlp_bda"):
                    dropout = place(f"{kind} {module.layer_number} {site}", drop=module.hidden_dropout)
                    vars(module)[site] = partial(_bias_dropout_add, dropout)
            dropped = getattr(module, "embedding_dropout", None)
            if isinstance(dropped, torch.nn.Dropout):
                # DDP has hooks on the module itself, so the module stays and only its forward is ours.
                vars(dropped)["forward"] = partial(_drop, place("embedding", drop=dropped.p), dropped)
    return model_chunks


def _drop(dropout: DocumentDropout, module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden states [rows, 1, h] after the dropout, in the mode of Megatron's module."""
    return dropout(hidden, module.training)


def _bias_dropout_add(dropout: DocumentDropout, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return a function of Megatron's format: bias, dropout and residual of one place, without fusion."""

    def add(with_bias: Added, residual: torch.Tensor, prob: float) -> torch.Tensor:
        output, bias = (None if part is None else part.to(residual.dtype) for part in with_bias)
        assert output is not None and prob == dropout.drop, f"{prob=}"
        return residual + dropout(output if bias is None else output + bias, training)

    return add
