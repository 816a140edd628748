"""Profile the layers of the training bench on one GPU: a cost file that plans read (``--cost-file``).

    .venv/bin/python scripts/bench/plan/gpu_profile.py --output h100.json [--json]

``--device cpu`` profiles the demo's model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from scripts.bench.gpu import gpu_parser, parse_on_gpu
from scripts.bench.plan.gpu_training import MODEL
from scripts.bench.report import printed_by
from scripts.demo import BYTESCALE, CONTEXT
from scripts.demo import MODEL as DEMO_MODEL

TINY = ["--max-tokens", "256", "--repeats", "1"]
TINY_ON_GPU = ["--max-tokens", "1024", "--repeats", "1"]
"""On a GPU, starting the kernels of 256 tokens takes longer than computing them, and no cost fits."""


def profile_command(output: Path, on_cpu: bool, is_tiny: bool = False) -> list[str]:
    """Return the command. The last value of a repeated flag counts."""
    command = [*BYTESCALE, "profile", "--json", "--output", str(output)]
    if on_cpu or is_tiny:
        return [
            *command,
            *(TINY if on_cpu else TINY_ON_GPU),
            *(["--cpu"] if on_cpu else []),
            "--",
            *DEMO_MODEL,
            *CONTEXT,
            *(["--bf16"] if not on_cpu else []),
        ]
    of_model = MODEL[: MODEL.index("--hdp-tokens-per-rank")]  # the other flags do not change a layer
    return [*command, "--", *DEMO_MODEL, *of_model, "--bf16"]


def figures_of(printed: str) -> dict[str, Any]:
    """Return the command's JSON, and the largest relative error of a prediction for unseen lengths."""
    figures: dict[str, Any] = json.loads(printed[printed.index("{") :])
    errors = [abs(row["error"]) for row in figures["unseen"]]
    return {**figures, "largest_error": max(errors, default=0.0)}


def main() -> None:
    """Profile, print, and with ``--json`` end with one JSON object."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="cost file to write")
    args = parse_on_gpu(parser)
    figures = figures_of(printed_by(profile_command(args.output.resolve(), args.device == "cpu", args.quick)))
    print(f"{args.output}: largest error of unseen lengths {figures['largest_error']:.1%}")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
