"""Multi-token prediction over documents (DeepSeek-V3, section 2.2), on Megatron's own layers.

Layer k combines the state of each token with the embedding of the token k places later, and predicts the token after
that. Megatron shifts tokens, labels and masks between neighbouring rows, and sends messages if a static
context-parallel group shares a sequence. Here the loader has already read the later tokens of every row from the
document (``bytescale_ext/data/samples/future.py``). So no shift crosses the end of a document, a ring or a slice, and
no messages are needed. Attention, positions and the output layer are the same as in the model.

For each of the D depths, ``mtp_loss_scaling_factor / D`` times the sum of ``future_weights`` times the cross entropy is
added to the loss of a micro-batch. The log prints this sum over the labels of the step, without the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from bytescale_ext.config.multi_token import MultiTokenConfig
from bytescale_ext.data.samples.future import no_future
from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_angles
from megatron.bytescale.core.models.gpt.chunked_loss import chunked_loss
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.registry import specialize

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron.bytescale.runtime import StepState

Report = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

Inputs = tuple[tuple[object, ...], dict[str, Any]]
"""Positional and keyword arguments of a module, as a hook changes them."""


class LaterTokenLayer(MultiTokenPredictionLayer):
    """Megatron's layer, taking the tokens after each row from a table instead of shifting rows."""

    def _get_embeddings(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Callable[..., torch.Tensor],
        **given: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return the same values as Megatron's method, from tables [remaining depths, t] of tokens and positions."""
        ahead = partial(embedding, input_ids=input_ids[:1], position_ids=position_ids[:1])
        mask = given.pop("padding_mask", None)  # rows are not shifted, so the mask is not either
        shifted = super()._get_embeddings(None, None, lambda **_: ahead(), **given)  # type: ignore[arg-type]
        return input_ids[1:], position_ids[1:], mask, *shifted[3:]


def use_later_tokens(
    settings: MultiTokenConfig, chunk_tokens: int | None, step: StepState, model_chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: give the multi-token prediction layers documents and their losses."""
    for chunk in model_chunks:
        if getattr(chunk, "mtp_process", False):
            LaterTokens(chunk, settings, chunk_tokens, step)
    return model_chunks


def give_depth(layer: LaterTokenLayer, inputs: tuple[object, ...], kwargs: dict[str, Any]) -> Inputs:
    """Hook of a multi-token prediction layer: name its depth, where ``num_layers - depth`` rows of tokens remain."""
    params = copy(kwargs["packed_seq_params"])
    params.depth = layer.config.mtp_num_layers - len(kwargs["input_ids"])
    return inputs, {**kwargs, "packed_seq_params": params}


class LaterTokens:
    """Hooks on the chunk with the multi-token prediction layers, and the values they record in a forward pass."""

    def __init__(self, chunk: GPTModel, settings: MultiTokenConfig, chunk_tokens: int | None, step: StepState) -> None:
        self.chunk, self.settings, self.chunk_tokens, self.step = chunk, settings, chunk_tokens, step
        self.labels: torch.Tensor | None = None
        self.states: torch.Tensor | None = None
        if chunk.share_embeddings_and_output_weights:
            # Layers may add the gradient of the output weight to Megatron's buffer themselves. With this mark DDP adds
            # the gradient of the embedding too; Megatron sets it only in models of one stage.
            chunk.shared_embedding_or_output_weight().zero_out_wgrad = True
            if not chunk.pre_process:
                # Megatron allocates a weight here, passes the embedding in its place, and fails when it saves both.
                chunk.output_layer.weight = None
        for layer in chunk.mtp.layers:
            specialize(layer, LaterTokenLayer)
            # A repeated layer runs at each depth, where its attention and its router see other tokens.
            layer.register_forward_pre_hook(give_depth, with_kwargs=True)
            layer.mtp_model_layer.register_forward_pre_hook(self.enter, with_kwargs=True)
            layer.mtp_model_layer.register_forward_hook(self.leave, with_kwargs=True)
        chunk.register_forward_pre_hook(self.begin, with_kwargs=True)
        chunk.mtp.register_forward_pre_hook(self.use_tables, with_kwargs=True)
        chunk.mtp.register_forward_hook(self.note)

    def begin(self, chunk: torch.nn.Module, inputs: tuple[object, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Keep tokens and labels from Megatron's model, which would shift them, and embed the tokens here instead."""
        self.labels = kwargs["labels"]
        if self.labels is None:
            return None
        tokens, positions, *others = inputs
        embedded = self.chunk.embedding(input_ids=tokens, position_ids=positions) if self.chunk.pre_process else None
        own = {"labels": None, "decoder_input": embedded, "output_processor": self.losses}
        return (None, positions, *others), {**kwargs, **own}

    def use_tables(self, block: torch.nn.Module, inputs: tuple[object, ...], kwargs: dict[str, Any]) -> Inputs:
        """Pass the layers each row's later tokens and their positions, [depths, t]; 0 past the document's end."""
        params, labels = kwargs["packed_seq_params"], self.labels
        assert labels is not None and params.positions is not None, f"{params=}"
        targets = self.targets(params)
        tokens = torch.cat((labels, targets[:-1].clamp_min(0)))
        ahead = torch.arange(1, len(tokens) + 1, device=labels.device)[:, None]
        positions = (params.positions + ahead) * (targets >= 0)
        if hasattr(self.chunk, "rotary_pos_emb"):
            changed = use_document_angles(self.chunk.rotary_pos_emb, block, inputs, kwargs)
            kwargs = kwargs if changed is None else changed[1]
        return inputs, {**kwargs, "input_ids": tokens, "position_ids": positions}

    def enter(self, layer: torch.nn.Module, inputs: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """Announce the depth of a layer that starts, or is recomputed."""
        self.step.depth = kwargs["packed_seq_params"].depth

    def leave(
        self,
        layer: torch.nn.Module,
        inputs: tuple[object, ...],
        kwargs: dict[str, Any],
        outputs: tuple[torch.Tensor, object],
    ) -> None:
        """Return to depth 0 after a layer, and announce its depth again before the backward pass of its states.

        ``outputs``: states [s / ranks, 1, h], and Megatron's context.
        """
        depth, self.step.depth = self.step.depth, 0

        def enter_again(_: torch.Tensor) -> None:
            self.step.depth = depth

        if outputs[0].requires_grad:
            outputs[0].register_hook(enter_again)

    def note(self, block: torch.nn.Module, inputs: tuple[object, ...], output: torch.Tensor) -> None:
        """Record the states of all depths, [(1 + depths) * s / ranks, 1, h]."""
        self.states = output

    def targets(self, params: DocumentSeqParams) -> torch.Tensor:
        """Return the token that each depth predicts for each row, [depths, t]; negative past the document's end."""
        assert params.positions is not None, f"{params=}"
        if params.future is not None:
            return params.future.t()
        return no_future(len(params.positions), self.settings.num_heads).to(params.positions).t()

    def losses(
        self,
        *,
        hidden_states: torch.Tensor,
        labels: None,
        output_layer: ColumnParallelLinear,
        output_weight: torch.Tensor | None,
        packed_seq_params: DocumentSeqParams,
        **model: Any,
    ) -> torch.Tensor:
        """GPTModel's ``output_processor``: return the sums of each depth, followed by the model's losses.

        Collective on the tensor-parallel group. Returns [depths + s].

        Args:
            hidden_states: input of the model's output layer, [s / ranks, 1, h].
            labels: always None, because ``begin`` took the labels from Megatron's model.
            output_layer: output layer of the model.
            output_weight: weight of the output layer if the layer has no weight of its own.
            packed_seq_params: layout of the micro-batch or slice.
            model: other callables of ``GPTModel``: its loss, and its scale of logits.
        """
        assert self.labels is not None and self.states is not None, f"{packed_seq_params=}"
        own = self._losses(hidden_states, self.labels, output_layer, output_weight, model)
        if model["config"].mtp_detach_heads:
            output_weight = (output_layer.weight if output_weight is None else output_weight).detach()
        weights, sums = packed_seq_params.future_weights, []
        _, *states = self.states.chunk(1 + self.settings.num_heads)
        for depth, (state, target) in enumerate(zip(states, self.targets(packed_seq_params), strict=True)):
            each = self._losses(state, target.clamp_min(0)[None], output_layer, output_weight, model)[0]
            weight = torch.zeros_like(each) if weights is None else weights[:, depth]
            sums.append((weight * each).sum())
        self.labels = self.states = None
        return torch.cat((torch.stack(sums), own[0]))

    def _losses(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: torch.Tensor | None,
        model: dict[str, Any],
    ) -> torch.Tensor:
        """Return the float32 losses [1, s] of states [s / ranks, 1, h] for labels [1, s]."""
        if self.chunk_tokens is not None:
            where = {"output_layer": output_layer, "output_weight": output_weight, **model}
            return chunked_loss(self.chunk_tokens, hidden_states=hidden, labels=labels, **where).float()
        logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=model["runtime_gather_output"])
        losses: torch.Tensor = model["compute_language_model_loss"](labels, model["scale_logits"](logits))
        return losses.float()


def report(settings: MultiTokenConfig, of_model: Callable[[torch.Tensor], Report], output: torch.Tensor) -> Report:
    """Return (loss, number of labels, figures of the log line) from the result of ``LaterTokens.losses``.

    ``of_model``: report of the model's own losses [s].
    """
    num_depths = settings.num_heads
    sums = output[:num_depths]
    loss, num_labels, figures = of_model(output[num_depths:])
    loss = loss + settings.loss_scale * sums.sum()
    for depth, weighted in enumerate(sums.detach(), 1):
        figures[f"mtp_{depth} loss"] = torch.stack([weighted, num_labels.to(weighted)])
    return loss, num_labels, figures


def report_depths(
    settings: MultiTokenConfig, forward_step: Callable[..., tuple[torch.Tensor, Callable[..., Report]]]
) -> Callable[..., tuple[torch.Tensor, Callable[..., Report]]]:
    """Return ``forward_step_func`` that reports the losses of the model and of all depths, [depths + s]."""

    def forward(data_iterator: Iterator[object], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Report]]:
        output, of_model = forward_step(data_iterator, model)
        return output, partial(report, settings, of_model)

    return forward
