"""Routers for micro-batches in slices, with the auxiliary losses of whole micro-batches (``loads.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter

from bytescale_ext.config.slices import SliceConfig
from megatron.bytescale.core.transformer.moe.loads import (
    ExpertLoads,
    GradientOfScores,
    LayerLoads,
    SliceLoad,
    balance_gradient,
    balance_loss,
)

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime


class AuxiliaryLoss(NamedTuple):
    """One auxiliary loss of a slice.

    Attributes:
        kind: name of the loss in Megatron's flags.
        scores: scores of this rank's tokens, [tokens, columns].
        load: contribution of the slice to its micro-batch's loads.
    """

    kind: str
    scores: torch.Tensor
    load: SliceLoad


class SliceRouter(TopKRouter):
    """Megatron's router over slices of micro-batches."""

    def __init__(self, *, runtime: Runtime, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.runtime = runtime

    @property
    def loads(self) -> ExpertLoads:
        """The loads that routers record for other slices; valid while a step of slices runs."""
        loads = self.runtime.step.expert_loads
        assert loads is not None, "no step of slices is running"
        return loads

    @property
    def run(self) -> tuple[object, int]:
        """This router and the running depth: the router of a repeated layer routes once at each depth."""
        return self, self.runtime.step.depth

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens as Megatron does: logits [rows, b, experts] -> probabilities and map, both [tokens, experts].

        Megatron skips auxiliary losses in a forward pass without gradients. If the layer will be recomputed, the first
        backward pass still needs the loads of all slices and ranks, so this method records them.
        """
        routed: tuple[torch.Tensor, torch.Tensor] = super().routing(logits, padding_mask)
        is_recomputed_later = self.training and not torch.is_grad_enabled()
        step = self.runtime.step
        has_loads = step.expert_loads is not None or step.routed is not None
        if is_recomputed_later and has_loads and self.is_aux_loss_enabled():
            num_rows, batch = logits.shape[:2]
            mask = None if padding_mask is None else padding_mask.reshape(-1)
            chosen, scores = compute_routing_scores_for_aux_loss(
                logits.view(-1, self.num_experts), self.topk, self.score_function, self.config.moe_router_fusion, mask
            )
            self._apply_aux_loss(routed[0], scores, chosen, mask is not None)
            self._apply_seq_aux_loss(routed[0], scores, chosen, num_rows, batch, mask is not None)
        return routed

    def balanced(self, kind: str, scores: torch.Tensor, chosen: torch.Tensor, has_padding: bool) -> AuxiliaryLoss:
        """Return one auxiliary loss of a slice. ``scores``, ``chosen``: [tokens, columns]."""
        by_expert, local, total = get_tokens_per_expert_and_token_count(
            chosen, self.tp_cp_group, self.topk, with_padding_mask=has_padding
        )
        return AuxiliaryLoss(kind, scores, SliceLoad(by_expert, scores.detach().sum(0), total, local))

    def attach(
        self,
        probs: torch.Tensor,
        loss: AuxiliaryLoss,
        weight: Callable[[SliceLoad], torch.Tensor | float],
        record: Callable[[SliceLoad, torch.Tensor], None],
    ) -> torch.Tensor:
        """Attach the auxiliary loss of the whole micro-batch to the probabilities of a slice, and return them.

        Args:
            probs: probabilities of the slice, [tokens, experts].
            loss: auxiliary loss of the slice.
            weight: loads of the micro-batch -> factor of the loss.
            record: logs the loss; it receives the loads of the micro-batch and the loss.
        """
        loads: LayerLoads = self.loads.note(self.run, loss.kind, loss.load)
        if self.loads.is_last() and not loads.is_recorded:
            loads.is_recorded = True
            total = loads.total()
            record(total, balance_loss(total, self.num_experts, self.topk))

        def gradient() -> torch.Tensor:
            total = loads.total()
            return balance_gradient(total, self.num_experts, self.topk) * weight(total)

        return with_gradient(probs, loss.scores, gradient)


def with_gradient(probs: torch.Tensor, scores: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the probabilities [tokens, experts] with a loss attached, whose gradient is made in the backward pass.

    ``scores``, ``make``: see ``GradientOfScores``.
    """
    scalar: torch.Tensor = GradientOfScores.apply(scores, make)
    attached: torch.Tensor = MoEAuxLossAutoScaler.apply(probs, scalar)
    return attached


class SampleRouter(SliceRouter):
    """The router of Megatron's samples in slices, with the losses that Megatron gives whole micro-batches.

    Without ``--calculate-per-token-loss`` Megatron divides auxiliary losses by the number of micro-batches of a step.
    It counts each slice as a micro-batch, so losses are multiplied by the number of slices. With the flag Megatron
    divides by the labels of the step, and multiplies each loss by the tokens of its micro-batch
    (``attach_and_log_load_balancing_loss``).
    """

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        loss = self.balanced("aux_loss", scores, chosen, with_padding_mask)
        return self._attach_mean(probs, loss, coefficient, "load_balancing_loss")

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach the mean loss of the samples of a micro-batch; each sample has one column per expert."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        scores, chosen = scores.reshape(seq_length, -1), chosen.reshape(seq_length, -1)
        loss = self.balanced("seq_aux_loss", scores, chosen, with_padding_mask)
        return self._attach_mean(probs, loss, coefficient, "seq_load_balancing_loss", bsz)

    def _attach_mean(
        self, probs: torch.Tensor, loss: AuxiliaryLoss, coefficient: float, name: str, batch: int = 1
    ) -> torch.Tensor:
        """Attach a loss that is a mean over ``batch`` samples; a sample has one column per expert."""

        def weight(total: SliceLoad) -> torch.Tensor | float:
            return coefficient / batch * self._divided_by_megatron(total.num_local_tokens * batch)

        def record(_: SliceLoad, value: torch.Tensor) -> None:
            get_moe_metrics_tracker().record(
                name, value / batch, self.layer_number, self.config.num_layers, reduce_group=self.tp_cp_group
            )

        return self.attach(probs, loss, weight, record)

    def _divided_by_megatron(self, num_tokens: torch.Tensor | float) -> torch.Tensor | float:
        """Return the divisor that Megatron applies to gradients in addition to a step's number of micro-batches.

        ``num_tokens``: tokens of a micro-batch on this rank.
        """
        if self.calculate_per_token_loss:
            return num_tokens * int(self.tp_cp_group.size())
        return self.loads.num_slices

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the slice's share of the micro-batch's z loss to logits [tokens, experts], and return the logits."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        assert padding_mask is None, "samples have no padding"
        lengths, action = self.runtime.run.get(SliceConfig).lengths, self.loads.action
        assert action is not None, "no slice is running"
        share = lengths[action.slice_index] / sum(lengths)
        loss = z_loss_func(logits.float(), 1.0) * share
        weight = coefficient / self.tp_cp_group.size() * self._divided_by_megatron(logits.shape[0] / share)
        get_moe_metrics_tracker().record(
            "z_loss", loss, self.layer_number, self.config.num_layers, avg_group=self.tp_dp_cp_group
        )
        return MoEAuxLossAutoScaler.apply(logits, loss * weight)
