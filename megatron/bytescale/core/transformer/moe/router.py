"""The router of a mixture of experts over documents, with auxiliary losses that ignore padding.

Under hybrid data parallelism micro-batches differ in size and number, and some contain padding. So each loss is a mean
over all T tokens of the step::

    aux_loss          1/T sum over micro-batches m of T_m E sum_i f_i P_i
                      f, P over the T_m tokens that a rank (with its tensor-parallel group) routes in m
    seq_aux_loss      1/T sum over documents d of T_d E sum_i f_i P_i
                      f, P over the T_d tokens of d, on all ranks and in all slices (``document_loads.py``)
    global_aux_loss   E sum_i f_i P_i
                      P over the step, f over the step before (``step_loads.py``)
    z_loss            1/T sum over tokens of logsumexp(logits)^2

Only the first depends on the plan. A layer of multi-token prediction that is repeated divides all losses by its depths
in the log, and the first three in gradients too.

Megatron divides all gradients of a step by its number of labels. A step may have few labels (only answers) or none
(documents of one token). So sums over tokens are multiplied by the step's labels / T (``StepState.label_shares``), and
a coefficient has the same effect with every loss mask.
All losses, and the loads that update the expert bias, ignore padding. Megatron computes the same with
``--calculate-per-token-loss``, except for padding. There a micro-batch of padding divides by zero (here it adds
nothing), padding on some of the tensor-parallel ranks changes the weight of tokens (here it does not), and the mask of
the expert bias does not match the shape of the routing map. The logged values are means over the tokens of the step,
while Megatron logs means over micro-batches. With slices, m is still the whole micro-batch (``loads.py``).
"""

from __future__ import annotations

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.utils import unwrap_model

from bytescale_ext.data.samples.packed import PackedMicroBatch
from megatron.bytescale.core.transformer.document_dropout import jitter
from megatron.bytescale.core.transformer.moe.counted_layer import number_in_model
from megatron.bytescale.core.transformer.moe.loads import SliceLoad
from megatron.bytescale.core.transformer.moe.slice_router import SliceRouter, with_gradient
from megatron.bytescale.core.transformer.moe.step_loads import LAST, count_choices, shares_of_last_step


class DocumentRouter(SliceRouter):
    """Megatron's router with ``padding_mask`` [rows] (True: padding).

    Communicates only on the tensor-parallel group, whose ranks hold the same micro-batch. Other ranks run different
    numbers of micro-batches.
    """

    def apply_input_jitter(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply hidden states [rows, 1, h] by noise in ``1 +- moe_input_jitter_eps`` that a token always has."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return input
        return input * jitter(self.runtime, number_in_model(self), input.shape, eps).to(input.dtype)

    @property
    def num_depths(self) -> int:
        """How often the router runs for a token: once, or at each depth of a repeated layer."""
        return self.config.mtp_num_layers if self.is_mtp_layer and self.config.mtp_use_repeated_layer else 1

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return the coefficient of a loss, which is a mean over the depths of a repeated layer, as in Megatron."""
        coefficient: float = super().get_aux_loss_coeff(aux_loss_type)
        return coefficient / self.num_depths

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        in_slices = self.runtime.step.expert_loads is not None
        if coefficient == 0 or not (in_slices or torch.is_grad_enabled()):
            return probs
        assert with_padding_mask, f"{with_padding_mask=}"
        if in_slices:
            return self.attach(
                probs,
                self.balanced("aux_loss", scores_for_aux_loss, routing_map, True),
                lambda total: coefficient * total.num_tokens * self.labels_per_token,
                self._record_mean,
            )
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
        return MoEAuxLossAutoScaler.apply(probs, loss * coefficient * self.labels_per_token)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach the balancing loss of each document (``document_loads.py``); shapes as in ``SliceRouter.balanced``."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        assert with_padding_mask, f"{with_padding_mask=}"
        routed, comm = self.runtime.step.routed, self.runtime.parts.comm
        assert routed is not None and comm is not None, f"{routed=} {comm=}"
        documents = routed.loads
        complete = documents.add(self.run, routed, scores, chosen)
        loads = documents.routers[self.run]
        if complete is not None:
            documents.share(loads, self.tp_cp_group, comm, comm.rank)
            self._record("seq_load_balancing_loss", documents.take_loss(loads, self.topk))

        def gradient() -> torch.Tensor:
            weights = documents.weights(loads, self.topk) * (coefficient * self.labels_per_token)
            return weights[routed.documents]

        return with_gradient(probs, scores, gradient)

    def _apply_global_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        """Attach the balancing loss of all ranks (``step_loads.py``); shapes as in ``SliceRouter.balanced``."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        assert with_padding_mask, f"{with_padding_mask=}"
        count_choices(self, chosen)
        loss = self.num_experts * (scores.sum(0) * shares_of_last_step(self)).sum()
        self._record("global_load_balancing_loss", loss)
        return MoEAuxLossAutoScaler.apply(probs, loss * coefficient * self.labels_per_token)

    @property
    def labels_per_token(self) -> torch.Tensor | float:
        """The ratio of the labels of the step to its tokens, over all ranks: a scalar."""
        return self.runtime.step.label_shares.per_token

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the z loss to logits [rows, experts], and return the logits."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        assert padding_mask is not None
        loss = z_loss_func(logits.float(), 1.0, padding_mask=padding_mask) * (~padding_mask).sum()
        self._record("z_loss", loss)
        return MoEAuxLossAutoScaler.apply(logits, loss * coefficient * self.labels_per_token)

    def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *args: object) -> None:
        """Load the router. Checkpoints of runs without ``global_aux_loss`` have no loads of a step before."""
        if hasattr(self, LAST):
            state.setdefault(prefix + LAST, getattr(self, LAST))
        super()._load_from_state_dict(state, prefix, *args)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        if padding_mask is not None:  # Megatron's own mask has another shape in some versions
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)

    def _record_mean(self, total: SliceLoad, mean_loss: torch.Tensor) -> None:
        """Record the auxiliary loss of a micro-batch with the loads ``total``."""
        self._record("load_balancing_loss", mean_loss * total.num_tokens)

    def _record(self, name: str, loss: torch.Tensor) -> None:
        """Record this rank's sum over tokens, scaled so that Megatron's report prints the mean over the step.

        The report sums over the tensor-parallel group. It averages over HDP ranks and over ``get_num_microbatches()``,
        which is not the number of micro-batches here.
        """
        batch = self.runtime.step.batch
        assert batch is not None, "no planned step is running"
        num_parts = self.runtime.run.cluster.num_ranks * get_num_microbatches()
        get_moe_metrics_tracker().record(
            name,
            loss * (num_parts / batch.num_tokens / self.num_depths),
            number_in_model(self),
            self.config.num_layers + (self.config.mtp_num_layers or 0),
            reduce_group=self.tp_cp_group,
        )


def padding_mask(packed: PackedMicroBatch, model: torch.nn.Module) -> torch.Tensor | None:
    """Return Megatron's ``padding_mask``, bool [1, rows], True in padding; None without experts.

    Under sequence parallelism Megatron splits the mask over the tensor-parallel ranks where it embeds tokens. Elsewhere
    the mask is already this rank's part: on later pipeline stages, and with multi-token prediction, where a hook embeds
    the tokens.
    """
    chunk = unwrap_model(model)
    if chunk.config.num_moe_experts is None:
        return None
    mask = torch.arange(packed.num_rows, device=packed.tokens.device) >= packed.micro_batch.num_tokens
    if chunk.config.sequence_parallel and (chunk.mtp_process or not chunk.pre_process):
        group = chunk.pg_collection.tp
        mask = mask.chunk(group.size())[group.rank()]
    return mask[None]
