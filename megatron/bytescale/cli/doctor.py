"""``bytescale doctor``: installed packages, choices with their reasons, features and their patches of Megatron."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass

from megatron.bytescale.arguments.refusals import ALWAYS
from megatron.bytescale.cli.shared.inputs import count, launch_words
from megatron.bytescale.cli.shared.options import add_cpu, add_json
from megatron.bytescale.versions import TESTED, version_of

NAME = "doctor"
HELP = "print installed packages, the attention kernel and the backend with reasons, features and patches"
EXAMPLE = "bytescale doctor --dtype bf16 --head-dim 128"

GPUS = {"sm80": 8, "sm90": 9, "sm100": 10, "sm120": 12}
"""Generation of GPUs -> its major compute capability."""

_PACKAGES = (
    "megatron-core",
    "torch",
    "numpy",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "apex",
    "nvidia-nccl-cu13",
)

NOT_RUN = {
    "--transformer-impl transformer_engine": "losses and gradients equal one process, with its grouped experts "
    "played in PyTorch",
    "--fp8-format": "rows, plans and forecasts are tested on CPU, also with experts",
    "--moe-token-dispatcher-type flex": "losses and gradients equal one process with DeepEP and HybridEP played in "
    "PyTorch",
}
"""Setting that no test has run on a GPU -> what is known of it."""


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """The attention kernel for a type and a head width, with the reasons.

    Attributes:
        kernel: kernel on this device.
        reason: reason of the choice.
        dtype, head_dim: type and width of a head.
        not_chosen: reasons against better kernels.
        on_gpus: generation of GPUs -> the kernel there with the packages that are installed here, and with all
            packages, if all pass their probes.
    """

    kernel: str
    reason: str
    dtype: str
    head_dim: int
    not_chosen: dict[str, str]
    on_gpus: dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FeatureReport:
    """A row of the table of features.

    Attributes:
        name, flag, summary: columns of the table; ``flag`` turns the feature on.
        flags: flags of this feature.
        patches: functions of Megatron that its patches replace or copy.
        refusals: replacement of each refused flag.
    """

    name: str
    flag: str
    summary: str
    flags: list[str]
    patches: list[str]
    refusals: dict[str, str]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Everything that ``doctor`` prints.

    Attributes:
        python: version of the interpreter.
        packages: version of each package, None if it is not installed.
        device: name of the GPU, or "cpu".
        backend, backend_reason: backend of ``torch.distributed``, and the reason.
        attention, features: reports of the kernel and of each feature.
        refusals: replacement of each setting that every run refuses.
        not_run: settings that no test has run on a GPU, with what is known of them.
        patches: printed rows of the functions that patches replace or copy.
        healthy: whether the patches fit the installed Megatron.
    """

    python: str
    packages: dict[str, str | None]
    device: str
    backend: str
    backend_reason: str
    attention: AttentionReport
    features: list[FeatureReport]
    refusals: dict[str, str]
    not_run: dict[str, str]
    patches: list[str]
    healthy: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale doctor``."""
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU, else fp32")
    parser.add_argument(
        "--head-dim", type=count, default=128, metavar="N", help="width of an attention head (%(default)s)"
    )
    parser.add_argument("--flags", action="store_true", help="also print the flags of each feature")
    parser.add_argument(
        "--refusals", action="store_true", help="also print the settings that each feature and each run refuse"
    )
    add_cpu(parser)
    parser.add_argument(
        "--launch",
        metavar="LINE",
        help="instead: print the changes that a launch line of Megatron needs to run with HDP, and forecast its memory",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report. The exit code is 1 if the patches do not fit the installed Megatron.

    With ``--launch``, print the changes of that line; the exit code is 1 if a decision is left to the user.
    """
    if args.launch is not None:
        launch_words(args.launch)  # before the slow imports
    from megatron.bytescale import cpu

    stand_ins = cpu.install_if_wanted(["--cpu"] if args.cpu else sys.argv)
    if args.launch is not None:
        from megatron.bytescale.cli.shared.migrate import changes_text, migrate

        migration = migrate(args.launch, on_cpu=args.cpu)
        print(json.dumps(asdict(migration), indent=2) if args.json else changes_text(migration))
        return 0 if migration.runs else 1
    report = diagnose(args, on_cpu=stand_ins is not None)
    print(json.dumps(asdict(report), indent=2) if args.json else text_of(report, args.flags, args.refusals))
    return 0 if report.healthy else 1


def diagnose(args: argparse.Namespace, on_cpu: bool) -> DoctorReport:
    """Return the report of this machine. Without a GPU, the stand-ins for CUDA must be installed."""
    import torch

    from bytescale_ext.attention.kernels.table import choose_kernel, expected_kernels
    from megatron.bytescale import status
    from megatron.bytescale.features import refusals

    device = torch.device("cpu" if on_cpu else "cuda")
    dtype_name = args.dtype or ("fp32" if on_cpu else "bf16")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype_name]
    kernel, reason, considered = choose_kernel(device, dtype, args.head_dim)
    on_gpus = {name: expected_kernels(major, dtype, args.head_dim) for name, major in GPUS.items()}
    patches = status()
    return DoctorReport(
        python=platform.python_version(),
        packages={name: version_of(name) for name in _PACKAGES},
        device="cpu" if on_cpu else torch.cuda.get_device_name(),
        backend="gloo" if on_cpu else "nccl",
        backend_reason=("--cpu was given" if args.cpu else "torch sees no GPU") if on_cpu else "torch sees a GPU",
        attention=AttentionReport(kernel.name, reason, dtype_name, args.head_dim, dict(considered), on_gpus),
        features=features_report(),
        refusals={row.flag: row.instead[ALWAYS] for row in refusals() if ALWAYS in row.instead},
        not_run=NOT_RUN,
        patches=patches,
        healthy=not any("unknown source" in row for row in patches),
    )


def features_report() -> list[FeatureReport]:
    """Return the report of each feature."""
    from megatron.bytescale.features import FEATURES, patches_of, refusals
    from megatron.bytescale.patches import rows_of

    return [
        FeatureReport(
            name=feature.name,
            flag=feature.flag,
            summary=feature.summary,
            flags=[action.option_strings[0] for action in feature.actions()],
            patches=[row.target for row in (*rows_of(feature.name), *patches_of([feature.name]))],
            refusals={
                row.flag: row.instead[feature.name].format(feature.flag)
                for row in refusals()
                if feature.name in row.instead
            },
        )
        for feature in FEATURES
    ]


def text_of(report: DoctorReport, with_flags: bool = False, with_refusals: bool = False) -> str:
    """Return the report as text."""
    attention = report.attention
    lines = [f"python     {report.python}"]
    lines += [f"{name:20} {version or 'not installed'}" for name, version in report.packages.items()]
    lines.append(f"{'tested with':20} megatron-core {', '.join(TESTED)}")
    lines += [
        "",
        f"device     {report.device}",
        f"backend    {report.backend} ({report.backend_reason})",
        f"attention  {attention.kernel} for {attention.dtype}, head width {attention.head_dim} ({attention.reason})",
    ]
    lines += [f"           not {name}: {why}" for name, why in attention.not_chosen.items()]
    for gpu, (here, best) in attention.on_gpus.items():
        packages = "" if here == best else f", with its package {best}"
        lines.append(f"  on {gpu:6} {here}{packages}")
    lines += ["", f"{'feature':12} {'switched on by':24} flags patches refusals  (--flags and --refusals list them)"]
    for feature in report.features:
        counts = f"{len(feature.flags):5} {len(feature.patches):7} {len(feature.refusals):8}"
        lines.append(f"{feature.name:12} {feature.flag:24} {counts}  {feature.summary}")
        lines += [f"    {flag}" for flag in feature.flags] * with_flags
        lines += [f"    not {flag}: {instead}" for flag, instead in feature.refusals.items()] * with_refusals
    if with_refusals:
        lines += ["", "refused in each run:"]
        lines += [f"    not {flag}: {instead}" for flag, instead in report.refusals.items()]
    lines += ["", "accepted, but not run on a GPU:"]
    lines += [f"  {setting}: {known}" for setting, known in report.not_run.items()]
    lines += ["", "functions of Megatron that features replace:", *report.patches]
    return "\n".join(lines)
