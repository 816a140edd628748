"""The router of a mixture of experts over documents: auxiliary losses that mean the same under every plan.

Under hybrid data parallelism micro-batches differ in size and number, and some hold padding. So each loss is a sum
over tokens, and the step divides it by the number of its labels, as it does with the language-model loss::

    aux_loss   sum over micro-batches m of  T_m E sum_i f_i P_i     f, P over the T_m tokens that one rank (with its
                                                                    tensor-parallel group) routes in m
    z_loss     sum over tokens of  logsumexp(logits)^2              no trace of the plan at all

Padding has no part in either, nor in the loads that move the expert bias. This is what Megatron does with
``--calculate-per-token-loss``, with three differences where padding comes in: a micro-batch of padding alone adds
nothing (there it divides by zero), padding that falls on some tensor-parallel ranks only does not change the weight
of a token, and the mask of the expert bias has the shape of the routing map. The logged figures are means over the
tokens of the step; Megatron's would count each micro-batch alike.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from bytescale_ext.data.packed import PackedMicroBatch


class DocumentRouter(TopKRouter):
    """Megatron's router, told by ``padding_mask`` [rows] (True: padding) which rows are tokens.

    Communicates on the tensor-parallel group, whose ranks hold the same micro-batch; on no other, as ranks
    have different numbers of micro-batches.
    """

    def __init__(self, *, runtime: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.runtime = runtime

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        assert with_padding_mask, f"{with_padding_mask=}"
        tokens_per_expert, _, num_tokens = get_tokens_per_expert_and_token_count(
            routing_map, self.tp_cp_group, self.topk, with_padding_mask=True
        )
        mean_loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=num_tokens.clamp(min=1),
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=1.0,
            fused=self.config.moe_router_fusion,
        )
        loss = mean_loss * num_tokens
        self._record("load_balancing_loss", loss)
        return MoEAuxLossAutoScaler.apply(probs, loss * coefficient)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        assert padding_mask is not None
        loss = z_loss_func(logits, 1.0, padding_mask=padding_mask) * (~padding_mask).sum()
        self._record("z_loss", loss)
        return MoEAuxLossAutoScaler.apply(logits, loss * coefficient)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        mask = None if padding_mask is None else padding_mask[:, None]
        super()._apply_expert_bias(routing_map, padding_mask=mask)

    def _record(self, name: str, loss: torch.Tensor) -> None:
        """Log this rank's sum over tokens, so that what Megatron's report makes of all is the mean over the step.

        The report sums over the tensor-parallel group, and averages over HDP ranks and over what Megatron takes
        for the number of micro-batches.
        """
        num_parts = self.runtime.config.num_ranks * get_num_microbatches()
        get_moe_metrics_tracker().record(
            name,
            loss * (num_parts / self.runtime.step.num_tokens),
            self.layer_number,
            self.config.num_layers,
            reduce_group=self.tp_cp_group,
        )


def padding_mask(packed: PackedMicroBatch, model: torch.nn.Module) -> torch.Tensor | None:
    """``padding_mask`` of Megatron's model: bool [1, rows], True in padding; None for a model without experts.

    Under sequence parallelism the first pipeline stage gives each tensor-parallel rank its part of the mask; the
    later ones take it as it comes, so there it must be this rank's part already.
    """
    chunk = unwrap_model(model)
    if chunk.config.num_moe_experts is None:
        return None
    mask = torch.arange(packed.num_rows, device=packed.tokens.device) >= packed.micro_batch.num_tokens
    if chunk.config.sequence_parallel and not chunk.pre_process:
        group = chunk.pg_collection.tp
        mask = mask.chunk(group.size())[group.rank()]
    return mask[None]
