"""``bytescale doctor``: what is installed, what is chosen and why, and what is replaced in Megatron."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from typing import Any

NAME = "doctor"
HELP = "print what is installed, which attention kernel and backend are chosen and why, and the patch table"
EXAMPLE = "bytescale doctor --dtype bf16 --head-dim 128"

_PACKAGES = ("megatron-core", "torch", "numpy", "transformer-engine", "flash-attn", "apex", "nvidia-nccl-cu13")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default=None, help="default: bf16 on a GPU, else fp32"
    )
    parser.add_argument(
        "--head-dim", type=int, default=128, metavar="N", help="width of an attention head (%(default)s)"
    )
    parser.add_argument("--cpu", action="store_true", help="answer for training with --cpu")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report. Exit code 1 when the installed Megatron is not the one that the patches are for."""
    from megatron.bytescale import cpu

    stand_ins = cpu.install_if_wanted(["--cpu"] if args.cpu else sys.argv)
    report = diagnose(args, on_cpu=stand_ins is not None)
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0 if report["healthy"] else 1


def diagnose(args: argparse.Namespace, on_cpu: bool) -> dict[str, Any]:
    """Everything that ``doctor`` prints, as plain values."""
    import torch

    from bytescale_ext.attention.kernels import choose_kernel
    from megatron.bytescale import status

    device = torch.device("cpu" if on_cpu else "cuda")
    dtype_name = args.dtype or ("fp32" if on_cpu else "bf16")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype_name]
    kernel, reason, considered = choose_kernel(device, dtype, args.head_dim)
    patches = status()
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(),
        "backend": "gloo" if on_cpu else "nccl",
        "backend_reason": ("--cpu was given" if args.cpu else "torch sees no GPU") if on_cpu else "torch sees a GPU",
        "attention": {
            "kernel": kernel.name,
            "reason": reason,
            "dtype": dtype_name,
            "head_dim": args.head_dim,
            "not_chosen": {name: why for name, why in considered},
        },
        "patches": patches,
        "healthy": not any("unknown source" in row for row in patches),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def as_text(report: dict[str, Any]) -> str:
    """The report for a person."""
    attention = report["attention"]
    lines = [f"python     {report['python']}"]
    lines += [f"{name:20} {version or 'not installed'}" for name, version in report["packages"].items()]
    lines += [
        "",
        f"device     {report['device']}",
        f"backend    {report['backend']} ({report['backend_reason']})",
        f"attention  {attention['kernel']} for {attention['dtype']}, head width {attention['head_dim']} "
        f"({attention['reason']})",
    ]
    lines += [f"           not {name}: {why}" for name, why in attention["not_chosen"].items()]
    lines += ["", "Megatron functions that --hybrid-data-parallel replaces:", *report["patches"]]
    return "\n".join(lines)
