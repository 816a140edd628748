"""Our flags in Megatron's parser, what we switch on by ourselves, and everything that is refused by name."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale_ext.config import HdpConfig


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ByteScale's groups to Megatron's parser (``extra_args_provider``)."""
    parser.usage = "%(prog)s FLAGS (--help lists them)"  # not a thousand lines before each message
    group = parser.add_argument_group("bytescale: device")
    group.add_argument("--cpu", action="store_true", help="Train on CPU with gloo. On by itself where there is no GPU.")
    group = parser.add_argument_group("bytescale: hybrid data parallelism")
    group.add_argument(
        "--hybrid-data-parallel",
        action="store_true",
        help="Give each document as many data-parallel ranks as it needs and pack the short ones.",
    )
    group.add_argument(
        "--hdp-tokens-per-rank",
        type=int,
        metavar="C",
        help="The most tokens of a micro-batch on one rank. A document of s tokens gets ceil(s / C) ranks.",
    )
    group.add_argument(
        "--hdp-plan-ahead", type=int, metavar="N", help="Steps planned and read ahead in the background (2)."
    )
    group.add_argument(
        "--hdp-attention-kernel", metavar="NAME", help="Attention kernel; `bytescale doctor` lists them. Default: best."
    )
    group.add_argument(
        "--hdp-static-width",
        type=int,
        metavar="W",
        help="For comparison: cut every document over fixed groups of W ranks, as --context-parallel-size W does.",
    )
    group.add_argument(
        "--hdp-log-dir", type=Path, metavar="DIR", help="Write metrics.jsonl, and the timeline of one step, to DIR."
    )
    group.add_argument(
        "--hdp-timeline-step", type=int, metavar="N", help="Record when each rank computes what in iteration N."
    )
    return parser


@dataclass(frozen=True)
class Refusal:
    """One combination that hybrid data parallelism does not run."""

    flag: str
    applies: Callable[[Any], bool]
    instead: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above(name: str, limit: float) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 0) > limit


def _refuse(flag: str, instead: str, applies: Callable[[Any], bool] | None = None) -> Refusal:
    return Refusal(flag, applies or _is_set(flag.lstrip("-").replace("-", "_")), instead)


_REMOVE = "remove it, or train without --hybrid-data-parallel"
REFUSALS: tuple[Refusal, ...] = (
    _refuse(
        "--context-parallel-size > 1",
        "leave it at 1: --hybrid-data-parallel gives each document its own width",
        _above("context_parallel_size", 1),
    ),
    _refuse("--hybrid-context-parallel", "choose one: --hybrid-data-parallel takes its place"),
    _refuse(
        "--pipeline-model-parallel-size > 1",
        "pipelines are not supported yet: use tensor parallelism",
        _above("pipeline_model_parallel_size", 1),
    ),
    _refuse(
        "--expert-model-parallel-size > 1",
        "expert parallelism is not supported yet",
        _above("expert_model_parallel_size", 1),
    ),
    _refuse("--num-experts", "mixtures of experts are not supported yet", _is_set("num_experts")),
    _refuse("--cuda-graph-impl", "micro-batches change their shape", lambda a: a.cuda_graph_impl != "none"),
    _refuse("--enable-cuda-graph", "micro-batches change their shape"),
    _refuse("--external-cuda-graph", "micro-batches change their shape"),
    _refuse("--optimizer-cuda-graph", _REMOVE),
    _refuse("--use-megatron-fsdp", "use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    _refuse("--use-torch-fsdp2", "use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    _refuse("--num-distributed-optimizer-instances > 1", _REMOVE, _above("num_distributed_optimizer_instances", 1)),
    _refuse("--tensor-parallel-num-weight-shards", _REMOVE),
    _refuse("--tp-comm-overlap", "its buffers have one fixed shape"),
    _refuse("--multi-latent-attention", _REMOVE),
    _refuse("--mtp-num-layers", _REMOVE),
    _refuse("--experimental-attention-variant", _REMOVE),
    _refuse("--hybrid-layer-pattern", _REMOVE),
    _refuse("--hybrid-override-pattern", _REMOVE),
    _refuse("--heterogeneous-layers-config-path", _REMOVE),
    _refuse("--heterogeneous-layers-config-encoded-json", _REMOVE),
    _refuse("--spec", "--hybrid-data-parallel brings its own layer spec"),
    _refuse("--transformer-impl inference_optimized", "use local or transformer_engine",
            lambda a: a.transformer_impl == "inference_optimized"),
    _refuse("--apply-layernorm-1p", "it needs TransformerEngine",
            lambda a: a.layernorm_zero_centered_gamma and a.transformer_impl == "local"),
    _refuse("--num-query-groups", "make it a divisor of --num-attention-heads",
            lambda a: a.group_query_attention and a.num_attention_heads % (a.num_query_groups or 1)),
    _refuse("--attention-backend", "choose with --hdp-attention-kernel", lambda a: a.attention_backend.name != "auto"),
    _refuse("--use-kitchen-attention", "choose with --hdp-attention-kernel"),
    _refuse("--max-seqlen-per-dp-cp-rank", "give --hdp-tokens-per-rank"),
    _refuse("--window-size", "sliding-window attention is not supported"),
    _refuse("--softmax-type", "use vanilla", lambda a: getattr(a, "softmax_type", "vanilla") != "vanilla"),
    _refuse("--attention-dropout > 0", "add --attention-dropout 0 (Megatron's default is 0.1)",
            _above("attention_dropout", 0)),
    _refuse("--apply-query-key-layer-scaling", _REMOVE),
    _refuse("--qk-clip", _REMOVE),
    _refuse("--log-max-attention-logit", _REMOVE),
    _refuse("--position-embedding-type", "use rope, learned_absolute or none",
            lambda a: a.position_embedding_type not in ("rope", "learned_absolute", "none")),
    _refuse("--fp8-format", "use bf16: FP8 needs aligned token counts", _is_set("fp8")),
    _refuse("--fp4-format", "use bf16: FP4 needs aligned token counts", _is_set("fp4")),
    _refuse("--te-precision-config-file", "it may choose FP8, which needs aligned token counts"),
    _refuse("--fine-grained-activation-offloading", _REMOVE),
    _refuse("--cpu-offloading-num-layers", _REMOVE),
    _refuse("--rampup-batch-size", "steps are planned ahead with one batch size"),
    _refuse("--step-batch-size-schedule", "steps are planned ahead with one batch size"),
    _refuse("--decrease-batch-size-if-needed", _REMOVE),
    _refuse("--iterations-to-skip", _REMOVE),
    _refuse("--phase-transition-iterations", _REMOVE),
    _refuse("--full-validation", "use --eval-iters"),
    _refuse("--multiple-validation-sets", _REMOVE),
    _refuse("--sft", _REMOVE),
    _refuse("--fim-data", _REMOVE),
    _refuse("--mock-data", "build a corpus with `bytescale corpus`"),
    _refuse("--per-dataset-sequences-path", "lengths come from the .idx files"),
    _refuse("--dataloader-fast-cache-load", "document samples keep no index cache"),
    _refuse("--dataloader-defer-npy-index-mmap", "document samples keep no index cache"),
    _refuse("--dataloader-inter-document-masking", "documents never attend to each other here"),
    _refuse("--reset-position-ids", "positions always start anew with each document here"),
    _refuse("--reset-attention-mask", "documents never attend to each other here"),
    _refuse("--eod-mask-loss", "the last token of a document never has a label here"),
    _refuse("--dataloader-type cyclic", _REMOVE, lambda a: a.dataloader_type == "cyclic"),
    _refuse("--micro-batch-size > 1", "leave it at 1: documents are packed by tokens", _above("micro_batch_size", 1)),
    _refuse("--eval-micro-batch-size > 1", "leave it at 1", _above("eval_micro_batch_size", 1)),
    _refuse("--no-align-param-gather", "a rank that waits in a ring must not hold back another's parameters",
            lambda a: not a.align_param_gather),
    _refuse("--logits-save-dir", _REMOVE),
    _refuse("--logits-load-dir", _REMOVE),
    _refuse("--use-checkpoint-args", "give the model's flags on the command line"),
    _refuse("--inprocess-restart", _REMOVE),
    _refuse("--perform-rl-step", _REMOVE),
    _refuse("--vision-pretraining", _REMOVE),
)  # fmt: skip


def refuse_conflicts(args: argparse.Namespace) -> None:
    """Raise ValueError, naming the flag, for the first setting that cannot run with hybrid data parallelism."""
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise ValueError(f"--hybrid-data-parallel does not work with {refusal.flag}: {refusal.instead}")


def set_device_defaults(args: argparse.Namespace, argv: Sequence[str], on_cpu: bool) -> None:
    """Turn off what this machine cannot run, so that no command line has to.

    Without TransformerEngine Megatron's own layers are used; without Apex its fused kernels are off; on CPU
    gloo takes NCCL's place and weights are made on the CPU. Asking for TransformerEngine by name where it is
    not installed is an error.
    """
    has_engine = importlib.util.find_spec("transformer_engine") is not None and not on_cpu
    if args.transformer_impl == "transformer_engine" and not has_engine:
        if "--transformer-impl" in argv:
            reason = "there is no GPU" if on_cpu else "TransformerEngine is not installed (pip install .[gpu])"
            raise ValueError(f"--transformer-impl transformer_engine: {reason}; use --transformer-impl local")
        args.transformer_impl = "local"
    if not has_engine:
        args.apply_rope_fusion = False
        args.no_persist_layer_norm = True
    if on_cpu or importlib.util.find_spec("apex") is None:
        args.gradient_accumulation_fusion = args.gradient_accumulation_fusion and has_engine
        args.masked_softmax_fusion = False
    if on_cpu:
        args.distributed_backend = "gloo"
        args.use_cpu_initialization = True
        args.bias_gelu_fusion = args.bias_swiglu_fusion = args.bias_dropout_fusion = False
    if args.tensor_model_parallel_size > 1:  # Megatron asserts it before Blackwell
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_hdp_defaults(args: argparse.Namespace) -> None:
    """Switch on what hybrid data parallelism is built on; each is a flag of Megatron's."""
    args.calculate_per_token_loss = True  # ByteScale Eq. 1-2: one sum over all tokens, then one division
    args.dataloader_type = "external"
    args.micro_batch_size = args.eval_micro_batch_size = 1  # so that --global-batch-size counts documents
    args.create_attention_mask_in_dataloader = False
    args.dist_ckpt_optim_fully_reshardable = True  # resume with another number of ranks


def hdp_config(args: argparse.Namespace) -> HdpConfig | None:
    """The frozen configuration, or None without ``--hybrid-data-parallel``. Raises ValueError."""
    ours = ("tokens_per_rank", "plan_ahead", "static_width", "log_dir", "timeline_step", "attention_kernel")
    given = [name for name in ours if getattr(args, f"hdp_{name}") is not None]
    if not args.hybrid_data_parallel:
        if given:
            raise ValueError(f"--hdp-{given[0].replace('_', '-')} needs --hybrid-data-parallel")
        return None
    refuse_conflicts(args)
    for name, flag in (("seq_length", "--seq-length"), ("hdp_tokens_per_rank", "--hdp-tokens-per-rank"),
                       ("global_batch_size", "--global-batch-size")):  # fmt: skip
        if getattr(args, name) is None:
            raise ValueError(f"--hybrid-data-parallel needs {flag}")
    tensor_ranks = args.tensor_model_parallel_size
    if args.world_size % tensor_ranks:
        raise ValueError(
            f"{args.world_size} processes cannot be shared out over --tensor-model-parallel-size {tensor_ranks}; "
            f"start {(args.world_size // tensor_ranks + 1) * tensor_ranks} processes, or lower it"
        )
    num_ranks = args.world_size // tensor_ranks
    for flag, size in (("--global-batch-size", args.global_batch_size), ("--eval-global-batch-size",
                       args.eval_global_batch_size or args.global_batch_size)):  # fmt: skip
        if size < 1 or size % num_ranks:
            raise ValueError(
                f"{flag} {size} is not a multiple of the {num_ranks} data-parallel ranks, which Megatron counts "
                f"documents by; the next that is: {(max(size, 0) // num_ranks + 1) * num_ranks}"
            )
    return HdpConfig(
        tokens_per_rank=args.hdp_tokens_per_rank,
        rows_multiple=tensor_ranks if args.sequence_parallel else 1,
        longest_sequence=args.seq_length,
        num_ranks=num_ranks,
        plan_ahead=2 if args.hdp_plan_ahead is None else args.hdp_plan_ahead,
        kernel=args.hdp_attention_kernel,
        static_width=args.hdp_static_width,
        log_dir=args.hdp_log_dir,
        timeline_step=args.hdp_timeline_step,
    )


def check_checkpoint_folder(folder: str | None) -> None:
    """Find out at start, not at the first save, that ``--save`` cannot be written. Raises ValueError."""
    if folder is None:
        return
    probe = Path(folder) / f".writable-{os.environ.get('RANK', '0')}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--save {folder} cannot be written ({error.strerror}); choose another folder") from error


@contextlib.contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Turn what Megatron raises over arguments, in several types and lines, into a ValueError of one line."""
    try:
        yield
    except (AssertionError, RuntimeError, OSError) as error:
        broken = traceback.extract_tb(error.__traceback__)[-1].line  # many of its asserts have no message
        said = " ".join((str(error) or f"this must hold: {broken}").split())
        raise ValueError(f"Megatron refuses these arguments: {said}") from error


def parse(argv: Sequence[str], on_cpu: bool) -> tuple[argparse.Namespace, HdpConfig | None]:
    """Parse with Megatron's parser, settle and check everything, and set Megatron's globals.

    Raises ValueError, before anything is built, for what cannot run. After it: tokenizer, timers and writers exist.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    if any(word.split("=")[0] == "--yaml-cfg" for word in argv):  # it would replace all flags, ours too
        raise ValueError("--yaml-cfg does not work here: give the flags on the command line")
    with refusals_of_megatron():
        args = parse_args(add_arguments)
    set_device_defaults(args, argv, on_cpu)
    config = hdp_config(args)
    if config is not None:
        set_hdp_defaults(args)
    check_checkpoint_folder(args.save)
    with refusals_of_megatron():
        validate_args(args)
        set_global_variables(args)
    return args, config
