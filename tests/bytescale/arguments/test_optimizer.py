"""Bytes of a parameter's states under each optimizer of Megatron."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bytescale_ext.plan.memory.model_states import FUSED_ADAM, StateSizes
from megatron.bytescale.arguments.optimizer import has_fused_optimizers, state_sizes_of
from tests.bytescale.features.activations.test_flags import parsed

BF16 = {"params_dtype": torch.bfloat16, "bf16": True, "accumulate_allreduce_grads_in_fp32": True, "fp8": None}
PRECISE = {
    **BF16, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float32, "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.uint8, "accumulate_allreduce_grads_in_fp32": False,
}  # fmt: skip
MUON = {**BF16, "optimizer": "muon", "muon_scalar_optimizer": "adam", "muon_nesterov": False}
MUON_SIZES = StateSizes(moments=4, end_moments=8, end_update=4, matrix_update=12)

ON_GPUS = {
    "torch's Adam": (BF16, StateSizes(update=4)),
    "Adam of TransformerEngine": ({**BF16, "transformer_impl": "transformer_engine"}, FUSED_ADAM),
    "sums of gradients in 16 bits": (
        {**BF16, "accumulate_allreduce_grads_in_fp32": False}, StateSizes(gradient=2, update=8)
    ),
    "16 bits, TransformerEngine": (
        {**BF16, "accumulate_allreduce_grads_in_fp32": False, "transformer_impl": "transformer_engine"},
        StateSizes(gradient=2, update=4),
    ),
    "precision-aware": ({**PRECISE, "transformer_impl": "transformer_engine"}, StateSizes(2, 2, 3)),
    "precision-aware, FP8": (
        {**PRECISE, "transformer_impl": "transformer_engine", "fp8": "hybrid"}, StateSizes(2, 4, 3)
    ),
    "SGD": ({**BF16, "optimizer": "sgd", "sgd_momentum": 0.9}, StateSizes(moments=4, update=4)),
    "SGD without momentum": (
        {**BF16, "optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}, StateSizes(moments=0)
    ),
    "Lion": ({**BF16, "optimizer": "lion"}, StateSizes(moments=4)),
    "Muon": (MUON, MUON_SIZES),
    "Muon with Nesterov's momentum": ({**MUON, "muon_nesterov": True}, replace(MUON_SIZES, matrix_update=16)),
    "Muon with Lion": (
        {**MUON, "muon_scalar_optimizer": "lion"}, StateSizes(moments=4, end_moments=4, matrix_update=12)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_GPUS)
def test_each_optimizer_on_gpus(name: str) -> None:
    settings, expected = ON_GPUS[name]
    args = parsed(**settings)
    if "TransformerEngine" in name or "precision" in name:
        assert has_fused_optimizers(args)
    assert state_sizes_of(args, on_cuda=True) == expected


def test_on_cpu_an_update_goes_parameter_by_parameter() -> None:
    assert state_sizes_of(parsed(**BF16), on_cuda=False) == FUSED_ADAM
