"""Fit cost files of an H100 to published timings: bytescale_ext/measure/costs/h100_*.json.

    .venv/bin/python scripts/bench/plan/h100_costs.py --data FOLDER    # a second

FOLDER is a copy of DistCA's timings (github.com/hao-ai-lab/distca, ``distca/profiling/data``):

- ``compute-attn-H100.csv``: forward pass of causal flash-attn 2 with 64 query heads and 4 key heads of 128, for
  documents of L tokens over cp ranks, with heads over tp ranks. One rank computes ``L^2 / (2 cp)`` pairs.
- ``compute-mlp-only.bs2.tsv``: linear parts of a layer. The file states neither model nor tokens. With the sizes of
  DistCA's 34B model and 8,192 tokens at cp 1 the products run at 680 TFLOP/s. Twice the tokens would exceed the peak of
  the GPU, and half of them would mean a third of the peak.
- ``network-allgather-H100-8.csv``: eight GPUs of one node; each receives seven shares, as in a ring.

Constants of other models are scaled by FLOPs and bytes. A block of keys that a rank of a ring receives is one more
launch of attention: it takes the fitted seconds of a launch and of its queries, and its results are added to totals in
float32, at the memory bandwidth of the data sheet. The timings do not include backward passes (2.5 times for attention,
2 times for the rest; FlashAttention-2, Dao 2023, section 4.1), links between nodes, and the saved bytes of a token (34
x hidden; Korthikanti et al. 2022, equation 1).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.measure.cost_file import SHIPPED, write_cost
from bytescale_ext.measure.fit import fit_constants
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import (
    ATTENTION_BACKWARD_PER_FORWARD,
    BACKWARD_PER_FORWARD,
    LLAMA_7B,
    ModelShape,
    attention_flops_per_square,
    key_value_numbers,
    linear_flops_per_token,
    ring_bytes_per_token,
)

HEADS, HEAD_DIM = 64, 128  # of the measured attention
LINEAR_TOKENS = 8192  # of the measured linear parts at cp 1
MEMORY_BYTES_PER_SECOND = 3.35e12
"""Memory bandwidth of an H100 SXM, from NVIDIA's data sheet."""

JOINED_BYTES = 10
"""Bytes that are moved to add one number of a block, in bfloat16, to a total in float32, which is read and written."""

LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 20, 1 << 29  # smaller gathers are latency alone, larger ones lack memory
MODELS = {
    "h100_7b": LLAMA_7B,
    "h100_8b": ModelShape(32, 4096, 32, 8, 128, 14336, True, 128256),
    "h100_34b": ModelShape(48, 8192, 64, 8, 128, 22016, True, 32000),
}
"""Model of each cost file: ByteScale's 7B, Llama 3 8B (Dubey et al. 2024, table 3), and DistCA's 34B with the sizes of
CodeLlama (Roziere et al. 2023)."""


@dataclass(frozen=True)
class Fitted:
    """Constants of the GPU that fit the timings.

    Attributes:
        square, token: seconds of attention for a squared token of the measured heads, and for a token.
        attention_start, linear_start: fixed seconds.
        linear_flops: FLOP/s of the linear parts.
        bytes_per_second: bytes that each of eight ranks receives in a second.
        errors: median and worst relative error of each part, and the predicted timings.
        memory_bytes: bytes per second of the memory of the device.
    """

    square: float
    token: float
    attention_start: float
    linear_start: float
    linear_flops: float
    bytes_per_second: float
    errors: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    memory_bytes: float = MEMORY_BYTES_PER_SECOND


def read_rows(path: Path) -> list[Mapping[str, str]]:
    """Return the rows of a table. Raises ValueError if it cannot be read."""
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    except OSError as error:
        raise ValueError(f"--data: {path}: {error.strerror}") from None


def fit(folder: Path) -> Fitted:
    """Fit the constants to the three tables in a folder. Raises ValueError if a table is missing."""
    attention = read_rows(folder / "compute-attn-H100.csv")
    sizes = [tuple(int(row[name]) for name in ("L", "cp", "tp")) for row in attention]
    features = np.array([(length**2 / cp / tp, length / cp / tp, 1.0) for length, cp, tp in sizes])
    seconds = np.array([float(row["duration_per_doc"]) * 1e-3 for row in attention])
    alone = np.array([(cp, tp) == (1, 1) for _, cp, tp in sizes])
    constants = fit_constants(features[alone], seconds[alone])
    predicted = features @ constants
    long = np.array([length / cp >= 2048 for length, cp, _ in sizes])
    errors = {
        "attention": _errors(predicted[~alone & long], seconds[~alone & long], "shares of at least 2,048 tokens of "
                             "documents over several ranks, which the fit did not see"),
        "attention of short shares": _errors(predicted[~alone & ~long], seconds[~alone & ~long], "the other shares"),
    }  # fmt: skip
    linear = [row for row in read_rows(folder / "compute-mlp-only.bs2.tsv") if row["tp"] == "1"]
    tokens = np.array([(LINEAR_TOKENS / int(row["cp"]), 1.0) for row in linear])
    spent = np.array(
        [sum(float(value) for name, value in row.items() if name.startswith("megatron")) for row in linear]
    )
    per_token, linear_start = fit_constants(tokens, spent * 1e-3)
    errors["linear parts"] = _errors(tokens @ (per_token, linear_start), spent * 1e-3, "what was fitted")
    gathers = [row for row in read_rows(folder / "network-allgather-H100-8.csv")
               if LEAST_ELEMENTS <= int(row["nelem"]) <= MOST_ELEMENTS]  # fmt: skip
    received = np.array([(7.0 * 2 * int(row["nelem"]), 1.0) for row in gathers])
    taken = np.array([float(row["latency(ms)"]) * 1e-3 for row in gathers])
    per_byte, gather_start = fit_constants(received, taken)
    errors["gathers"] = _errors(received @ (per_byte, gather_start), taken, "what was fitted")
    flops = linear_flops_per_token(replace(MODELS["h100_34b"], num_layers=1, vocab=0)) / per_token
    return Fitted(*constants, float(linear_start), float(flops), 1.0 / float(per_byte), errors)


def _errors(predicted: np.ndarray, measured: np.ndarray, timings: str) -> tuple[float, float, str]:
    errors = np.abs(predicted / measured - 1.0)
    return statistics.median(errors.tolist()), float(errors.max()), f"{len(errors)} timings, {timings}"


def cost_of(shape: ModelShape, fitted: Fitted) -> ModelCost:
    """Return the costs of a model on one such GPU, in bfloat16."""
    layer = replace(shape, num_layers=1, vocab=0)
    heads = attention_flops_per_square(layer) / (2.0 * HEADS * HEAD_DIM)
    linear = linear_flops_per_token(layer) / fitted.linear_flops
    start = fitted.attention_start + fitted.linear_start
    keys, gradients = (size / fitted.bytes_per_second for size in ring_bytes_per_token(shape, 1, 2, 4))
    queries, join = heads * fitted.token, JOINED_BYTES / fitted.memory_bytes
    results = shape.num_heads * shape.head_dim
    forward = CostModel(
        heads * fitted.square,
        linear + queries,
        keys,
        start,
        h=queries + join * results,
        m=fitted.attention_start,
    )
    backward = CostModel(
        ATTENTION_BACKWARD_PER_FORWARD * forward.a,
        BACKWARD_PER_FORWARD * linear + ATTENTION_BACKWARD_PER_FORWARD * queries,
        gradients,
        BACKWARD_PER_FORWARD * start,
        h=ATTENTION_BACKWARD_PER_FORWARD * queries + join * (results + key_value_numbers(shape)),
        m=BACKWARD_PER_FORWARD * fitted.attention_start,
    )
    head = 2.0 * shape.hidden * shape.vocab / fitted.linear_flops
    return ModelCost(
        shape=shape,
        device="NVIDIA H100 (published timings)",
        dtype="bfloat16",
        tensor_parallel=1,
        source=source_text(fitted),
        forward=forward,
        backward=backward,
        head_forward=head,
        head_backward=BACKWARD_PER_FORWARD * head,
        layer_bytes=34.0 * shape.hidden,
        recompute_bytes=2.0 * shape.hidden,
    )


def source_text(fitted: Fitted) -> str:
    """Return the source of the constants, with the errors of the fit."""
    errors = "; ".join(
        f"{part}: median error {median:.1%}, worst {worst:.1%} ({timings})"
        for part, (median, worst, timings) in fitted.errors.items()
    )
    flops = 2.0 * HEADS * HEAD_DIM / fitted.square
    return (
        f"Our fit of DistCA's timings (github.com/hao-ai-lab/distca, distca/profiling/data) by scripts/bench/plan/"
        f"h100_costs.py: attention {flops / 1e12:.0f} TFLOP/s, linear parts {fitted.linear_flops / 1e12:.0f} TFLOP/s, "
        f"exchange inside a node {fitted.bytes_per_second / 1e9:.0f} GB/s. {errors}. Scaled to this model by FLOPs and "
        f"bytes. Not measured there: backward passes (2.5 x attention, 2 x the rest), blocks of rings (a launch "
        f"of attention, and a join at the memory bandwidth of the data sheet), links between nodes, kept bytes "
        f"(34 x hidden)."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the cost files and print the errors of the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="DistCA's tables")
    parser.add_argument("--output", type=Path, default=SHIPPED, metavar="FOLDER", help="folder of the cost files")
    args = parser.parse_args(argv)
    try:
        fitted = fit(args.data)
        for name, shape in MODELS.items():
            write_cost(args.output / f"{name}.json", cost_of(shape, fitted))
    except (ValueError, OSError) as error:
        print(f"h100_costs.py: error: {error}", file=sys.stderr)
        return 2
    print(source_text(fitted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
