"""The settings of Megatron that runs refuse. Each feature has its own table; this file has the table of all runs.

Every run refuses settings that Megatron 0.19.2 ignores silently, or fails on after the start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from megatron.bytescale.arguments.bad_input import Refused
from megatron.bytescale.arguments.conditions import (
    IS_CUT,
    IS_LOCAL,
    Condition,
    above,
    chosen,
    equals,
    given,
    includes,
    where,
)


@dataclass(frozen=True)
class Refusal:
    """One setting that some features do not support.

    Attributes:
        flag: name of the setting in messages.
        applies: condition that parsed arguments have the setting.
        instead: name of a refusing feature -> advice to the user.
    """

    flag: str
    applies: Condition
    instead: Mapping[str, str]

    def message(self, feature: str, feature_flag: str) -> str:
        """Return the error message of one feature, which ``feature_flag`` enables."""
        return f"{feature_flag} does not work with {self.flag}: {self.instead[feature].format(feature_flag)}"


ALWAYS: Final = "always"
"""The column of rows that refuse in every run; its messages use this text as a feature's flag."""

PROGRAM: Final = "bytescale"
REMOVE: Final = "remove it, or train without {}"


def refuse(
    flag: str,
    features: str,
    instead: str = REMOVE,
    applies: Condition | None = None,
    **own: str,
) -> Refusal:
    """Return a row of the table.

    Args:
        flag: see ``Refusal``; words after the first are not part of the flag.
        features: names of the features that refuse it, in one string.
        instead: advice for all these features; ``{}`` is replaced by the flag that enables the feature.
        applies: see ``Refusal``; by default, whether the argument of that name has a true value.
        own: different advice for single features.
    """
    return Refusal(
        flag,
        applies or given(flag.split()[0].lstrip("-").replace("-", "_")),
        {**dict.fromkeys(features.split(), instead), **own},
    )


def ignored(setting: str, is_read: Condition, instead: str, is_given: Condition | None = None) -> Refusal:
    """Return the row of a flag that Megatron accepts and ignores, on every command line.

    Args:
        setting: the flag, and in which case it is ignored; its first word is the flag.
        is_read: condition under which something reads the flag.
        instead: advice.
        is_given: condition that the flag is given; by default, that its argument has a value.
    """
    name = setting.split()[0].lstrip("-").replace("-", "_")
    return refuse(setting, ALWAYS, instead, (is_given or chosen(name)) & ~is_read)


def refuse_conflicts(args: argparse.Namespace, features: Mapping[str, str], rows: Collection[Refusal]) -> None:
    """Raise ``Refused`` with the message of every row that applies to an enabled feature, one for each flag.

    Args:
        args: result of Megatron's parser, before Megatron checks it.
        features: name of an enabled feature -> its flag.
        rows: table of refusals.
    """
    refusing = {**features, ALWAYS: PROGRAM}
    messages: dict[str, str] = {}
    for row in rows:
        names = [name for name in refusing if name in row.instead]
        flag = row.flag.split()[0]
        if names and flag not in messages and row.applies(args):
            messages[flag] = row.message(names[0], refusing[names[0]])
    if messages:
        raise Refused(*messages.values())


@dataclass(frozen=True)
class _WindowPattern:
    """The pattern of layers with a sliding window."""

    window_attn_skip_freq: int | list[int] | None
    num_layers: int

    def is_of_another_length(self) -> bool:
        """Return whether a list does not have one entry per layer, or a number is below 1."""
        frequency = self.window_attn_skip_freq
        if isinstance(frequency, list):
            return len(frequency) != self.num_layers
        return frequency is not None and frequency < 1


@dataclass(frozen=True)
class _Tracker:
    """The file of rejected results."""

    result_rejected_tracker_filename: str | None

    def cannot_be_written(self) -> bool:
        """Return whether no file can be created in its folder."""
        path = self.result_rejected_tracker_filename
        folder = os.path.dirname(os.path.abspath(path)) if path else "."
        return not (os.path.isdir(folder) and os.access(folder, os.W_OK))


def _capability() -> int:
    """Return the major compute capability of this process's GPU; 0 without a GPU."""
    import torch  # slow, and needed by few command lines

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


NO_MAMBA: Final = "train a GPT without it: there are no Mamba layers here"
_LACKS_ENGINE = Condition(lambda _: importlib.util.find_spec("transformer_engine") is None)
_NEEDS_ENGINE = "install TransformerEngine (pip install .[gpu]): Megatron 0.19.2 fails in the first step without it"
_IS_ON_CPU = equals("distributed_backend", "gloo")
_CHANGES_EXPERTS = (
    given("hybrid_data_parallel") | IS_CUT | chosen("moe_expert_slots") | chosen("moe_dts_steps")
    | given("moe_placement_trace")
)  # fmt: skip
"""Whether layers of experts are ours, which project latents without TransformerEngine."""
_IS_EMERGING = ~equals("optimizer", "adam", "sgd")
_LACKS_OPTIMIZERS = Condition(lambda _: importlib.util.find_spec("emerging_optimizers") is None)
_LACKS_GROUPED = Condition(lambda _: _capability() < 8)
_LACKS_DEEPEP = Condition(lambda _: importlib.util.find_spec("deep_ep") is None)
_RECOMPUTES_MODULES = equals("recompute_granularity", "selective") | given("recompute_activations")
_NO_SHARDS = "leave it at 1: only tensor parallelism divides weights"
_UNREAD = "remove it: no code of Megatron 0.19.2 reads it"
_OTHER_SCRIPT = "remove it: only Megatron's own pretrain_gpt.py has it"
REFUSALS: Final[tuple[Refusal, ...]] = (
    refuse("--hybrid-context-parallel", ALWAYS, "use --hybrid-data-parallel in its place"),
    refuse("--num-experts with biases of local layers without --hybrid-data-parallel", ALWAYS, "add it, or split "
           "experts (--expert-model-parallel-size): autograd does not allow Megatron's in-place addition of biases",
           IS_LOCAL & given("num_experts") & given("add_bias_linear") & ~above("expert_model_parallel_size", 1)
           & ~given("hybrid_data_parallel")),
    refuse("--overlap-moe-expert-parallel-comm", ALWAYS, "remove it: it runs its own schedule"),
    refuse("--tensor-parallel-num-weight-shards > 1", ALWAYS, _NO_SHARDS,
           above("tensor_parallel_num_weight_shards", 1)),
    refuse("--expert-tensor-parallel-num-weight-shards > 1", ALWAYS, _NO_SHARDS,
           above("expert_tensor_parallel_num_weight_shards", 1)),
    refuse("--multi-latent-attention of local layers without --hybrid-data-parallel", ALWAYS, "add "
           "--hybrid-data-parallel, or use --transformer-impl transformer_engine: Megatron's local attention has one "
           "head size", IS_LOCAL & given("multi_latent_attention") & ~given("hybrid_data_parallel")),
    refuse("--mtp-num-layers in pipelines", ALWAYS, "add --hybrid-data-parallel: otherwise stages get no tokens",
           given("mtp_num_layers") & above("pipeline_model_parallel_size", 1) & ~given("hybrid_data_parallel")),
    refuse("--hybrid-layer-pattern", ALWAYS, NO_MAMBA),
    refuse("--hybrid-override-pattern", ALWAYS, NO_MAMBA),
    refuse("--apply-residual-connection-post-layernorm", ALWAYS, _UNREAD),
    refuse("--vocab-extra-ids", ALWAYS, _UNREAD),
    refuse("--verify-integrity with another --ckpt-format than torch_dist", ALWAYS, "use --ckpt-format torch_dist",
           given("verify_integrity") & ~equals("ckpt_format", "torch_dist")),
    refuse("--save-activations-interval without TransformerEngine", ALWAYS, _NEEDS_ENGINE,
           given("save_activations_interval") & _LACKS_ENGINE),
    refuse("--save-dgrads-interval without TransformerEngine", ALWAYS, _NEEDS_ENGINE,
           given("save_dgrads_interval") & _LACKS_ENGINE),
    refuse("--config-logger-dir", ALWAYS, "remove it: Megatron 0.19.2 fails on it"),
    refuse("--openai-gelu", ALWAYS, _UNREAD),
    refuse("--cache-mla-latents", ALWAYS, "remove it: it belongs to inference, and Megatron fails on it in training"),
    refuse("--use-te-activation-func of local layers", ALWAYS, "remove it: it needs TransformerEngine",
           IS_LOCAL & given("use_te_activation_func")),
    refuse("--fp16-lm-cross-entropy", ALWAYS, "remove it: GPT models of Megatron 0.19.2 do not read it"),
    refuse("--fp32-residual-connection of local layers", ALWAYS, "remove it: it needs TransformerEngine",
           IS_LOCAL & given("fp32_residual_connection")),
    refuse("--output-logit-dtype of local layers", ALWAYS, "remove it: it needs TransformerEngine",
           IS_LOCAL & given("logit_dtype")),
    refuse("--exit-signal-handler-for-dataloader", ALWAYS, _UNREAD),
    refuse("--dist-ckpt-save-pre-mcore-014", ALWAYS, _UNREAD),
    refuse("--apply-layernorm-1p of local layers", ALWAYS, "remove it: it needs TransformerEngine",
           IS_LOCAL & given("layernorm_zero_centered_gamma")),
    refuse("--qk-l2-norm without experts", ALWAYS, "Megatron's local layers leave the norm out: use --transformer-impl "
           "transformer_engine, or --qk-layernorm", IS_LOCAL & given("qk_l2_norm") & ~given("num_experts")),
    refuse("--window-attn-skip-freq alone", ALWAYS, "add --window-size, or remove it",
           given("window_attn_skip_freq") & ~given("window_size")),
    refuse("--window-attn-skip-freq of another length", ALWAYS, "give a number above 0, or one entry for each layer",
           given("window_size") & where(_WindowPattern, _WindowPattern.is_of_another_length)),
    refuse("--fp8-format of local layers", ALWAYS, "use --transformer-impl transformer_engine, which needs a GPU and "
           "TransformerEngine (pip install .[gpu]); Megatron's local layers would ignore it", IS_LOCAL & given("fp8")),
    refuse("--rampup-batch-size without --hybrid-data-parallel", ALWAYS, "give --step-batch-size-schedule: Megatron "
           "0.19.2 ignores it", given("rampup_batch_size") & ~given("hybrid_data_parallel")),
    refuse("--full-validation alone", ALWAYS, "add --multiple-validation-sets, which Megatron 0.19.2 needs with it",
           given("full_validation") & ~given("multiple_validation_sets")),
    refuse("--multiple-validation-sets alone", ALWAYS, "add --full-validation, which Megatron 0.19.2 needs with it",
           given("multiple_validation_sets") & ~given("full_validation")),
    refuse("--dataloader-inter-document-masking", ALWAYS, "use --hybrid-data-parallel, where documents never attend to "
           "each other"),
    refuse("--logits-load-dir", ALWAYS, _OTHER_SCRIPT),
    refuse("--use-checkpoint-args", ALWAYS, "give the model's flags on the command line"),
    refuse("--ckpt-step with --use-distributed-optimizer and --ckpt-format torch", ALWAYS, "use --ckpt-format "
           "torch_dist, or --no-load-optim: Megatron 0.19.2 takes the last checkpoint's optimizer",
           given("ckpt_step") & equals("ckpt_format", "torch") & given("use_distributed_optimizer")
           & ~given("no_load_optim")),
    refuse("--non-persistent-ckpt-type local", ALWAYS, "use global: nothing checks the classes in checkpoints of "
           "nvidia_resiliency_ext before they are loaded", equals("non_persistent_ckpt_type", "local")),
    refuse("--ckpt-pg-tensors-cache-path", ALWAYS, "remove it: Megatron runs the pickles in this folder"),
    refuse("--inprocess-restart", ALWAYS, _OTHER_SCRIPT),
    refuse("--perform-rl-step", ALWAYS, "use Megatron's own train_rl.py"),
    refuse("--vision-pretraining", ALWAYS, "train a GPT without it"),
    refuse("--init-method-xavier-uniform", ALWAYS, "give --init-method-std: Megatron 0.19.2 fails on it"),
    refuse("--freeze-all-layers", ALWAYS, "remove it: nothing would train"),
    refuse("--log-straggler", ALWAYS, "use --hybrid-data-parallel, whose log names slow ranks"),
    refuse("--ddp-average-in-collective with --calculate-per-token-loss", ALWAYS, "remove one of them",
           given("ddp_average_in_collective") & given("calculate_per_token_loss")),
    refuse("--result-rejected-tracker-filename in a folder that cannot be written", ALWAYS, "choose another folder",
           where(_Tracker, _Tracker.cannot_be_written)),
    refuse("--moe-routing-trace-path on CPU", ALWAYS, "remove it: it needs a GPU",
           _IS_ON_CPU & given("moe_routing_trace_path")),
    refuse("--optimizer sgd with sharded states", ALWAYS, "use adam, or remove --use-distributed-optimizer and "
           "--use-megatron-fsdp: Megatron 0.19.2 cannot save the momentum of a shard", equals("optimizer", "sgd")
           & (given("use_distributed_optimizer") | given("use_megatron_fsdp"))),
    refuse("--optimizer sgd with --ckpt-format torch_dist", ALWAYS, "give --ckpt-format torch: Megatron 0.19.2 cannot "
           "load the momentum again", equals("optimizer", "sgd") & equals("ckpt_format", "torch_dist")
           & (given("save") | given("load"))),
    refuse("--optimizer of another package with --fp16", ALWAYS, "use --bf16", _IS_EMERGING & given("fp16")),
    refuse("--optimizer of another package with --overlap-param-gather-with-optimizer-step", ALWAYS,
           "remove the overlap", _IS_EMERGING & given("overlap_param_gather_with_optimizer_step")),
    refuse("--optimizer of another package with --num-distributed-optimizer-instances > 1", ALWAYS, "leave it at 1",
           _IS_EMERGING & above("num_distributed_optimizer_instances", 1)),
    refuse("--optimizer of another package with sharded float32", ALWAYS, "add --bf16: Megatron 0.19.2 fails in the "
           "first step without it", _IS_EMERGING & ~given("bf16")
           & (given("use_distributed_optimizer") | equals("optimizer", "dist_muon"))),
    refuse("--optimizer of another package", ALWAYS, "install emerging-optimizers (pip install .[optimizers]), or use "
           "adam or sgd",
           _IS_EMERGING & _LACKS_OPTIMIZERS),
    refuse("--optimizer-cpu-offload on CPU", ALWAYS, "remove it: it needs a GPU",
           _IS_ON_CPU & given("optimizer_cpu_offload")),
    refuse("--init-model-with-meta-device without FSDP", ALWAYS, "remove it: it needs --use-megatron-fsdp or "
           "--use-torch-fsdp2",
           given("init_model_with_meta_device") & ~(given("use_megatron_fsdp") | given("use_torch_fsdp2"))),
    refuse("--moe-router-topk 1 without --moe-router-pre-softmax", ALWAYS, "add --moe-router-pre-softmax: otherwise "
           "the router would have no gradient", given("num_experts") & equals("moe_router_topk", 1)
           & equals("moe_router_score_function", "softmax") & ~given("moe_router_pre_softmax")
           & ~equals("moe_router_load_balancing_type", "sinkhorn", ["sinkhorn"])),
    *(refuse(f"{flag} on CPU", ALWAYS, "remove it: it needs a GPU", _IS_ON_CPU & given(name))
      for flag, name in (("--moe-permute-fusion", "moe_permute_fusion"), ("--moe-router-fusion", "moe_router_fusion"),
                         ("--use-nccl-ub", "nccl_ub"))),
    refuse("--moe-grouped-gemm on CPU", ALWAYS, "remove it: it needs a GPU",
           _IS_ON_CPU & given("moe_grouped_gemm") & _LACKS_GROUPED),
    refuse("--moe-token-dispatcher-type flex on CPU", ALWAYS, "use alltoall: it needs a GPU and DeepEP",
           _IS_ON_CPU & equals("moe_token_dispatcher_type", "flex") & _LACKS_DEEPEP),
    refuse("--moe-latent-size of Megatron's own layers without TransformerEngine", ALWAYS, "add "
           "--hybrid-data-parallel: Megatron projects latents with TransformerEngine on a GPU, in local layers too",
           given("moe_latent_size") & IS_LOCAL & (_LACKS_ENGINE | _IS_ON_CPU) & ~_CHANGES_EXPERTS),
    refuse("--moe-apply-probs-on-input with several experts per token", ALWAYS, "give --moe-router-topk 1: Megatron "
           "fails in the first step",
           given("num_experts") & given("moe_apply_probs_on_input") & above("moe_router_topk", 1)),
    refuse("--moe-shared-expert-overlap with --moe-latent-size", ALWAYS, "remove it: Megatron supports both together "
           "only in inference", given("moe_shared_expert_overlap") & given("moe_latent_size")),
    refuse("--recompute-modules moe_act without --moe-grouped-gemm", ALWAYS, "leave moe_act out: only grouped experts "
           "recompute their activation function",
           _RECOMPUTES_MODULES & includes("recompute_modules", "moe_act") & ~given("moe_grouped_gemm")),
    *(refuse(f"--recompute-modules {module} without TransformerEngine", ALWAYS, f"leave {module} out: Megatron 0.19.2 "
             "asks TransformerEngine (pip install .[gpu]) in each forward pass",
             _RECOMPUTES_MODULES & includes("recompute_modules", module) & IS_LOCAL & _LACKS_ENGINE)
      for module in ("layernorm", "moe_act", "gdn_norm_out")),
    refuse("--ckpt-format fsdp_dtensor without --use-megatron-fsdp", ALWAYS, "use --ckpt-format torch_dist",
           equals("ckpt_format", "fsdp_dtensor") & ~given("use_megatron_fsdp")),
    refuse("--use-sharp", ALWAYS, "remove it: its process groups cannot be created here"),
    refuse("--sharp-enabled-group", ALWAYS, "remove it: its process groups cannot be created here"),
)  # fmt: skip
"""Refusals of every run."""
