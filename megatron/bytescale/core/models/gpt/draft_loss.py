"""Training of draft heads: the hook of the model's build, the loss, and the figures of the log line.

The loss of a step is the sum over heads i of ``decay**i`` times the cross entropy of their predictions. With
``hidden_weight``, the distance between the heads' states and the model's states is added. The sum is divided once per
step by the number of tokens that the first head can predict, so the loss does not depend on the layout. If the model is
trained too, its own loss is added. Megatron then divides by the model's labels, so the sum of the heads is multiplied
by labels / predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.config.drafts import DraftConfig
from bytescale_ext.data.samples.future import no_future
from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles
from megatron.bytescale.core.models.gpt.chunked_loss import chunked_loss
from megatron.bytescale.core.models.gpt.draft_heads import DraftHeads, embed_by_output
from megatron.bytescale.core.models.gpt.gpt_layer_specs import dense_layer_spec
from megatron.bytescale.core.models.gpt.later_states import LaterStates, later_states
from megatron.bytescale.core.models.gpt.trunk import HEADS, Trunk, begin_as_last_layer, without_heads
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.runtime import LabelShares, Runtime

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

Report = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def add_draft_heads(
    settings: DraftConfig, chunk_tokens: int | None, runtime: Runtime, model_chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: freeze the model and add heads to the chunk with the output layer.

    Their layers are dense. Biases of experts are no parameters, so a frozen model keeps them by steps of size 0.
    """
    for chunk in model_chunks:
        trunk, model = Trunk(chunk, not settings.train_trunk), _as_gpt(chunk)
        model.hide_loss_modules = partial(without_heads, chunk)
        if trunk.is_frozen:
            model.config.moe_router_bias_update_rate = 0.0
        if not model.post_process:
            continue
        has_engine = model.config.transformer_impl == "transformer_engine"
        heads = DraftHeads(model.config, settings, dense_layer_spec(model.transformer_layer_spec, has_engine))
        chunk.add_module(HEADS, heads)
        chunk.register_load_state_dict_pre_hook(begin_as_last_layer)
        loss = DraftLoss(trunk, heads, chunk_tokens, runtime)
        chunk.register_forward_pre_hook(
            lambda chunk, args, kwargs, loss=loss: (args, {**kwargs, "output_processor": loss}), with_kwargs=True
        )
    return model_chunks


def _as_gpt(chunk: torch.nn.Module) -> GPTModel:
    return chunk


@dataclass(frozen=True)
class DraftLoss:
    """GPTModel's ``output_processor``: returns a micro-batch's sums for ``report``.

    Attributes:
        trunk: hooks on the model below the heads.
        heads: draft heads.
        chunk_tokens: number of tokens whose logits exist at the same time; None: all.
        runtime: source of the ring communicator; None if no ranks share sequences.
    """

    trunk: Trunk
    heads: DraftHeads
    chunk_tokens: int | None
    runtime: Runtime | None = None

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: torch.Tensor | None,
        labels: torch.Tensor,
        packed_seq_params: DocumentSeqParams,
        **model: Any,
    ) -> torch.Tensor:
        """Return the [2 heads + 3] sums that ``report`` splits, followed by the model's losses [s] if it is trained.

        The sums: loss, labels of each head, correct predictions of each head, accepted tokens, and the distance between
        the heads' and the model's states. Collective on the tensor-parallel group and in rings.

        Args:
            hidden_states: input of the model's output layer, [s / ranks, 1, h].
            output_layer: output layer of the model.
            output_weight: weight of the output layer if the layer has no weight of its own.
            labels: token after each row, [1, s].
            packed_seq_params: layout of the micro-batch or slice.
            model: other callables of ``GPTModel``: its loss, and its scale of logits.
        """
        weight = output_layer.weight if output_weight is None else output_weight
        sums = self._sums(hidden_states, labels, packed_seq_params, (output_layer, weight), model)
        if self.trunk.is_frozen:
            return sums
        process = partial(
            chunked_loss,
            self.chunk_tokens or labels.shape[1],
            output_layer=output_layer,
            output_weight=output_weight,
            **model,
        )
        return torch.cat((sums, process(hidden_states=hidden_states, labels=labels).flatten().float()))

    def _sums(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        params: DocumentSeqParams,
        output_layer_and_weight: tuple[ColumnParallelLinear, torch.Tensor],
        model: dict[str, Any],
    ) -> torch.Tensor:
        """Return the [2 heads + 3] sums for the arguments of ``__call__``; the weight is [v / ranks, h]."""
        output_layer, weight = output_layer_and_weight
        settings, group = self.heads.settings, output_layer.tp_group
        assert params.positions is not None and self.trunk.hidden is not None, f"{params=}"
        future = no_future(labels.shape[1], settings.num_heads).to(labels) if params.future is None else params.future
        is_shared = self.heads.config.sequence_parallel
        embed = partial(embed_by_output, weight=weight, group=group, scatter=is_shared)
        weight = weight.detach() if self.trunk.is_frozen else weight
        output = partial(output_layer, weight=weight)
        loss_of, scale = model["compute_language_model_loss"], model["scale_logits"]
        score = partial(scores, output=output, loss_of=loss_of, scale=scale, group=group)
        rotary = getattr(self.trunk.chunk, "rotary_pos_emb", None)
        angles = None if rotary is None else document_angles(rotary, params.positions)
        later = self._later_states(hidden, params, group if is_shared else None)
        state = self.heads.states(self.trunk.hidden, embed(labels), rotary_pos_emb=angles, packed_seq_params=params)
        zero, row = torch.zeros((), device=labels.device), torch.ones_like(labels[0]).bool()
        counts, right, loss, accepted, difference = [], [], zero, zero, zero
        for index in range(settings.num_heads):
            before = embed(future[:, index - 1].clamp_min(0)[None]) if index else None
            state, guess = self.heads.head(index, state, before)
            target, factor = future[:, index], settings.decay**index
            exists = target >= 0
            losses, hits = self._in_chunks(score, guess, target.clamp_min(0)[None])
            loss = loss + factor * (losses[0].float() * exists).sum()
            if later is not None:
                difference = difference + factor * later.difference(index, guess)
            hits = hits[0] & exists
            row = row & hits
            counts.append(exists.sum().float())
            right.append(hits.sum().float())
            accepted = accepted + row.sum()
        loss = loss + settings.hidden_weight * difference
        return torch.stack([loss, *counts, *right, accepted, difference.detach()])

    def _later_states(
        self, hidden: torch.Tensor, params: DocumentSeqParams, group: torch.distributed.ProcessGroup | None
    ) -> LaterStates | None:
        """Return the model states to compare the heads with, or None without ``hidden_weight``.

        ``hidden``: [s / ranks, 1, h].
        """
        if not self.heads.settings.hidden_weight:
            return None
        comm = None if self.runtime is None else self.runtime.parts.comm
        exchange: Any = None if comm is None else comm.exchange  # only rings need the communicator
        assert isinstance(params.layout, AttentionLayout), f"{params.layout=}"
        return later_states(hidden, params.layout, self.heads.settings.num_heads, exchange, group)

    def _in_chunks(
        self, score: Callable[..., tuple[torch.Tensor, torch.Tensor]], guess: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses and hits, both [1, s], of predictions [s / ranks, 1, h]; chunks compute logits twice."""
        rows = guess.shape[0]
        ranks = target.shape[1] // rows
        if self.chunk_tokens is None or self.chunk_tokens >= target.shape[1]:
            return score(guess, target)
        step = max(1, self.chunk_tokens // ranks)
        parts = zip(guess.split(step), target.unflatten(1, (ranks, rows)).split(step, 2), strict=True)
        done = [checkpoint(score, part, some.flatten(1), use_reentrant=False) for part, some in parts]
        losses, hits = ([part.unflatten(1, (ranks, -1)) for part in column] for column in zip(*done, strict=True))
        return torch.cat(losses, dim=2).flatten(1), torch.cat(hits, dim=2).flatten(1)


def scores(
    guess: torch.Tensor,
    target: torch.Tensor,
    *,
    output: Callable[[torch.Tensor], tuple[torch.Tensor, object]],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    scale: Callable[[torch.Tensor], torch.Tensor],
    group: torch.distributed.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses [b, s] of predictions [s / ranks, b, h], and whether each target [b, s] has the largest logit.

    Collective on the tensor-parallel group.
    """
    logits = scale(output(guess)[0])
    hits = has_largest_logit(logits.detach(), target, group)  # before the loss, which overwrites the logits
    return loss_of(target, logits), hits


def has_largest_logit(
    logits: torch.Tensor, target: torch.Tensor, group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """Return for each target [b, s] whether no logit [s, b, v / tp] on any rank is larger than the target's."""
    size = logits.shape[-1]
    local = target.transpose(0, 1) - group.rank() * size
    is_mine = (local >= 0) & (local < size)
    own = logits.gather(-1, local.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1).masked_fill(~is_mine, -torch.inf)
    both = torch.stack((own, logits.amax(-1)))
    if group.size() > 1:
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    return (both[0] >= both[1]).transpose(0, 1)


def report(settings: DraftConfig, sums: torch.Tensor) -> Report:
    """Return (loss, number of labels, figures of the log line) from the [2 heads + 3] sums of a micro-batch.

    "tokens accepted" is the mean number of consecutive heads, starting with the first, whose predictions are correct.
    """
    num_heads = settings.num_heads
    loss, counts, right, accepted, difference = sums.split([1, num_heads, num_heads, 1, 1])
    known = sums.detach()
    figures = {"draft loss": torch.cat((known[:1], known[1:2]))}
    for index in range(num_heads):
        figures[f"draft accuracy {index + 1}"] = torch.stack((right[index], counts[index])).detach()
    figures["draft tokens accepted"] = torch.cat((accepted, counts[:1])).detach()
    if settings.hidden_weight:
        figures["draft hidden loss"] = torch.cat((difference, counts[:1])).detach()
    return loss.sum(), counts[0].detach().to(torch.int), figures


def report_both(
    settings: DraftConfig, shares: LabelShares, of_model: Callable[[torch.Tensor], Report], output: torch.Tensor
) -> Report:
    """Return the joint report of heads and model.

    Args:
        settings: settings of the heads.
        shares: ratios of the current step's labels to predictions.
        of_model: report of the model alone; its labels are counted.
        output: [2 heads + 3] sums of the heads, followed by the model's losses [s].
    """
    num_sums = 2 * settings.num_heads + 3
    loss, _, figures = report(settings, output[:num_sums])
    model_loss, num_labels, of_trunk = of_model(output[num_sums:])
    return model_loss + loss * shares.per_guess, num_labels, {**of_trunk, **figures}
