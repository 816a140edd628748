"""Run every activation policy on one small model: losses against no policy, bytes kept and moved, work repeated.

Runs on CPU. All policies start from the same weights and see the same sequences, of changing lengths.

    .venv/bin/python scripts/bench/activation/activations.py [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bytescale_ext.plan.activation.forecast import forecast  # noqa: E402
from bytescale_ext.plan.activation.load import LayerSettings, Machine, cost_of_rates, layer_load  # noqa: E402
from bytescale_ext.plan.activation.plan import ActivationPlan  # noqa: E402
from bytescale_ext.plan.activation.policies import make_plan  # noqa: E402
from bytescale_ext.plan.cost.model_shape import ModelShape  # noqa: E402
from megatron.bytescale.training.one_device import build_model, run_policy  # noqa: E402

SHAPE = ModelShape(
    num_layers=4, hidden=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_hidden=352, gated=True, vocab=512
)
LENGTHS = [512, 300, 512, 77, 512]
HOST_BYTES = 64 << 20
RATES = (100e9, 100e9, 100e9)
LINK = 5e9


def plan_of_auto() -> ActivationPlan:
    """Return what ``auto`` chooses on a machine with 0.7 of the device memory that activations need."""
    load = layer_load(cost_of_rates(SHAPE, *RATES), LENGTHS[0], how=LayerSettings(element_bytes=4))
    whole = forecast(ActivationPlan("none"), load, Machine(0.0, 0.0)).device_bytes
    return make_plan("auto", load, Machine(0.7 * whole, HOST_BYTES, LINK))


PLANS = {
    "none": ActivationPlan("none"),
    "keep-attention": ActivationPlan("shares", 0.0, 1.0, 0.0, False, 2),
    "swap-only": ActivationPlan("shares", 1.0, 0.0, 1.0),
    "memo": ActivationPlan("memo", 0.5, 0.5, 1.0, False, 2),
    "memo-alpha-0": ActivationPlan("memo", 0.0, 1.0, 1.0, False, 2),
    "priced": ActivationPlan("priced", 0.5, 0.5, 1.0, True, 2),
    "offload": ActivationPlan("offload", 0.5, 0.0, 0.5, False, 2),
    "auto": plan_of_auto(),
}


def compare(lengths: list[int]) -> dict[str, Any]:
    """Return the figures of every policy; ``loss_difference`` is the largest of all steps."""
    torch.set_num_threads(1)
    bench = build_model(SHAPE, torch.float32, HOST_BYTES, on_cpu=True)
    results = {name: run_policy(bench, plan, lengths) for name, plan in PLANS.items()}
    for figures in results.values():
        losses = zip(figures["losses"], results["none"]["losses"], strict=True)
        figures["loss_difference"] = max(abs(one - other) for one, other in losses)
    for figures in results.values():
        del figures["losses"]
    return {"policies": results}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description="Compare activation policies on CPU.")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    results = compare(LENGTHS)
    table = Table(title=f"{SHAPE.num_layers} layers, {LENGTHS[0]} tokens, CPU")
    for column in ("policy", "loss difference", "kept MB", "swapped MB", "recomputed GFLOP", "step s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, figures in results["policies"].items():
        table.add_row(
            name,
            f"{figures['loss_difference']:.2g}",
            f"{figures['kept_bytes'] / 1e6:.2f}",
            f"{figures['swapped_bytes'] / 1e6:.2f}",
            f"{figures['recomputed_flops'] / 1e9:.3f}",
            f"{figures['step_seconds']:.3f}",
        )
    Console(width=100).print(table)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
