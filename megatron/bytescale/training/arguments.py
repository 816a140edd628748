"""Our flags in Megatron's parser, what we switch on by ourselves, and the configuration made of both."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bytescale_ext.config import HdpConfig, RemoteConfig
from bytescale_ext.plan.planner import BALANCES
from megatron.bytescale.core.transformer.moe.expert_ranks import ranks_that_share_experts
from megatron.bytescale.training import activations, seq1f1b
from megatron.bytescale.training.refusals import refuse_conflicts


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
        help="The most tokens of a micro-batch on one rank. A document of s tokens gets ceil(s / C) ranks or more.",
    )
    add_planner_arguments(group)
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
    add_remote_arguments(parser)
    seq1f1b.add_arguments(parser)
    activations.add_arguments(parser)
    mend_help(parser)
    return parser


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Double the bare percent signs in help texts: Megatron 0.19.2 has one, and ``--help`` ended with an error."""
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\(\w+\))", "%%", action.help)


def add_planner_arguments(group: argparse._ArgumentGroup) -> None:
    """The flags of the planner and of what watches over it."""
    group.add_argument(
        "--hdp-balance",
        choices=["auto", *BALANCES],
        help="What the planner balances. dp: the work of ranks that run freely; pp: that of pipelines, slot by slot, "
        "and of ranks that share experts; auto (default): the one of these that fits; bytescale: Algorithm 2 of the "
        "paper, and none: tokens alone, both to compare with.",
    )
    group.add_argument(
        "--hdp-cost",
        type=Path,
        metavar="FILE",
        help="Measured costs of this model on this hardware, by `bytescale profile`. Default: balance FLOPs.",
    )
    group.add_argument(
        "--hdp-ranks-per-node",
        type=int,
        metavar="N",
        help="Keep rings of up to N ranks inside nodes of N ranks. Default: from LOCAL_WORLD_SIZE.",
    )
    group.add_argument(
        "--hdp-kept-keys",
        type=int,
        metavar="TOKENS",
        help="With --seq1f1b-splits: each rank keeps the keys that it has received of documents of up to so many "
        "tokens, so that they travel once, not again with each slice. Default: as far as that takes no more memory "
        "than 1F1B; 0: none.",
    )
    group.add_argument(
        "--hdp-plan-ahead", type=int, metavar="N", help="Steps planned and read ahead in the background (2)."
    )
    group.add_argument(
        "--hdp-plan-seconds",
        type=float,
        metavar="S",
        help="Time for the plan of one step; then all ranks take the simple plan of none. Default: no limit.",
    )
    group.add_argument(
        "--hdp-check-plans-every",
        type=int,
        metavar="N",
        help="Compare the plans of all ranks in the first step and every N steps (100).",
    )


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the remote loader."""
    group = parser.add_argument_group("bytescale: remote loading")
    group.add_argument(
        "--hdp-loader",
        choices=["local", "ray"],
        help="local (default): Megatron's .bin and .idx files. ray: --data-path names .jsonl files, whose text is "
        "tokenized while training runs, by Ray actors.",
    )
    group.add_argument(
        "--hdp-ray-address",
        metavar="HOST:PORT",
        help="A Ray cluster that all machines of the run are part of. Default: Ray is started on this machine.",
    )
    group.add_argument("--hdp-ray-servers", type=int, metavar="N", help="Actors that read and tokenize (2).")
    group.add_argument(
        "--hdp-ray-server-tokens", type=int, metavar="N", help="Tokens that each of them keeps at most (16777216)."
    )
    group.add_argument("--hdp-json-key", metavar="KEY", help="Key of the text in each line (text).")


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
    if not args.hybrid_data_parallel:
        given = sorted(name for name, value in vars(args).items() if name.startswith("hdp_") and value is not None)
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} needs --hybrid-data-parallel")
        return None
    refuse_conflicts(args)
    for name, flag in (("seq_length", "--seq-length"), ("hdp_tokens_per_rank", "--hdp-tokens-per-rank"),
                       ("global_batch_size", "--global-batch-size")):  # fmt: skip
        if getattr(args, name) is None:
            raise ValueError(f"--hybrid-data-parallel needs {flag}")
    tensor_ranks, num_stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    model_ranks = tensor_ranks * num_stages
    if args.world_size % model_ranks:
        pipelines = f" x --pipeline-model-parallel-size {num_stages}" if num_stages > 1 else ""
        raise ValueError(
            f"{args.world_size} processes cannot be shared out over --tensor-model-parallel-size {tensor_ranks}"
            f"{pipelines}; start {(args.world_size // model_ranks + 1) * model_ranks} processes, or lower it"
        )
    num_ranks = args.world_size // model_ranks
    for flag, size in (("--global-batch-size", args.global_batch_size), ("--eval-global-batch-size",
                       args.eval_global_batch_size or args.global_batch_size)):  # fmt: skip
        if size < 1 or size % num_ranks:
            raise ValueError(
                f"{flag} {size} is not a multiple of the {num_ranks} data-parallel ranks, which Megatron counts "
                f"documents by; the next that is: {(max(size, 0) // num_ranks + 1) * num_ranks}"
            )
    chosen = {name: getattr(args, f"hdp_{name}") for name in ("plan_ahead", "plan_seconds", "check_plans_every",
             "ranks_per_node", "static_width", "log_dir", "timeline_step", "kept_keys")}  # fmt: skip
    expert_ranks = ranks_that_share_experts(args)
    aligned = num_stages > 1 or expert_ranks > 1
    balance = args.hdp_balance or "auto"
    return HdpConfig(
        tokens_per_rank=args.hdp_tokens_per_rank,
        rows_multiple=tensor_ranks if args.sequence_parallel else 1,
        longest_sequence=args.seq_length,
        num_ranks=num_ranks,
        balance=("pp" if aligned else "dp") if balance == "auto" else balance,
        num_stages=num_stages,
        num_slices=args.seq1f1b_splits or 1,
        eager=args.seq1f1b_eager,
        expert_ranks=expert_ranks,
        cost_file=args.hdp_cost,
        kernel=args.hdp_attention_kernel,
        remote=remote_config(args),
        plans_offload=activations.plans_offload(args),
        **{"ranks_per_node": ranks_of_a_node(model_ranks if args.use_tp_pp_dp_mapping else tensor_ranks, num_ranks)}
        | {name: value for name, value in chosen.items() if value is not None},
    )


def remote_config(args: argparse.Namespace) -> RemoteConfig | None:
    """How text is loaded, or None with ``--hdp-loader local``. Raises ValueError."""
    flags = {"address": "hdp_ray_address", "num_servers": "hdp_ray_servers",
             "server_tokens": "hdp_ray_server_tokens", "json_key": "hdp_json_key"}  # fmt: skip
    given = {field: getattr(args, name) for field, name in flags.items() if getattr(args, name) is not None}
    if args.hdp_loader == "ray":
        return RemoteConfig(**given)
    if given:
        raise ValueError(f"--{flags[next(iter(given))].replace('_', '-')} needs --hdp-loader ray")
    return None


def ranks_of_a_node(distance: int, num_ranks: int) -> int | None:
    """HDP ranks on this node, from torchrun's LOCAL_WORLD_SIZE; None where they do not fill it, or it holds all.

    ``distance``: processes from one HDP rank to the next, as Megatron lays ranks out.
    """
    ranks, rest = divmod(int(os.environ.get("LOCAL_WORLD_SIZE", "0")), distance)
    return ranks if ranks and not rest and ranks < num_ranks and not num_ranks % ranks else None


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


def parse(
    argv: Sequence[str], on_cpu: bool, settle: Callable[[argparse.Namespace], None] | None = None
) -> tuple[argparse.Namespace, HdpConfig | None]:
    """Parse with Megatron's parser, settle and check everything, and set Megatron's globals.

    ``settle`` changes what was parsed before it is looked at; the profile takes a training command that way.

    Raises ValueError, before anything is built, for what cannot run. After it: tokenizer, timers and writers exist.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    if any(word.split("=")[0] == "--yaml-cfg" for word in argv):  # it would replace all flags, ours too
        raise ValueError("--yaml-cfg does not work here: give the flags on the command line")
    with refusals_of_megatron():
        args = parse_args(add_arguments)
    if settle is not None:
        settle(args)
    set_device_defaults(args, argv, on_cpu)
    seq1f1b.set_defaults(args)
    config = hdp_config(args)
    if config is not None:
        set_hdp_defaults(args)
    check_checkpoint_folder(args.save)
    with refusals_of_megatron():
        validate_args(args)
        if config is not None and args.overlap_param_gather:  # Megatron turns it off where no virtual stages are
            args.align_param_gather = True
        set_global_variables(args)
    return args, config
