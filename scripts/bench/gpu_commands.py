"""The benches that ``gpu_all.py`` runs, the most valuable first: command lines, predicted minutes, headlines.

Predictions are seconds at the rates of activation plans; ``device_gb`` is device memory for activations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bytescale_ext.plan.activation.load import LayerLoad
from bytescale_ext.plan.cost.model_cost import model_flops
from scripts.bench.activation import gpu_activations, gpu_activations_calibrate, gpu_memory_plan
from scripts.bench.activation.activation_arms import (
    MAIN_ARMS,
    RATES,
    START_SECONDS,
    Settings,
    load_of,
    predicted_seconds,
)
from scripts.bench.activation.models import SHAPE
from scripts.bench.attention.gpu_attention import Settings as AttentionSettings
from scripts.bench.gpu_all import Command
from scripts.bench.pipeline.gpu_seq1f1b import LENGTHS as SLICED_LENGTHS

BENCH = Path(__file__).resolve().parent
CALIBRATED = "{output}/cost.json"
ATTENTION_RATE, BACKWARD_RATE = RATES[1:]
MOE_SECONDS = 13.0
"""Seconds of ``gpu_moe.py``: torch's start, and about ninety passes of 15 ms."""
TEST_SECONDS, PROFILE_SECONDS = 300.0, 100.0
"""Seconds of ``pytest -m gpu``, mostly starts of Megatron, and of a profile of layers."""
COMPILE_SECONDS, CORPUS_SECONDS, START_OF_MEGATRON_SECONDS = 30.0, 40.0, 60.0
TRAINING_STEPS, TRAINING_TOKENS, TRAINING_RATE = 10, 16 * 16384, 200e12
"""Steps of ``gpu_training.py``, tokens of its largest step, and a cautious FLOP/s of whole steps."""


def gpu_commands(device_gb: float, is_quick: bool = False) -> list[Command]:
    """Return the commands in order. ``is_quick``: with tiny sizes, which say nothing about speed."""

    def python(name: str, *words: str) -> tuple[str, ...]:
        return (sys.executable, str(BENCH / name), *words, *(["--quick"] if is_quick else []), "--json")

    def arms(length: int) -> Command:
        words = python("activation/gpu_activations.py", "--lengths", str(length))
        minutes = predicted_seconds(settings_of(device_gb, (length,))) / 60
        name, cost = f"activations_{length // 1024}k", ("--cost-file", CALIBRATED)
        return Command(name, words, minutes, arms_headline, cost)

    calibrate = python("activation/gpu_activations_calibrate.py", "--output", CALIBRATED)
    training = python("plan/gpu_training.py", "--steps", str(TRAINING_STEPS))
    profile = python("plan/gpu_profile.py", "--output", "{output}/h100.json")
    host_bound = python("activation/gpu_activations.py", "--host-bound")
    bound = replace(
        settings_of(device_gb, gpu_activations.HOST_BOUND_LENGTHS),
        shape=gpu_activations.HOST_BOUND_SHAPE,
        host_gb=gpu_activations.HOST_BOUND_GB,
    )
    of_32k, of_128k = (arms(length) for length in gpu_activations.LENGTHS)
    return [
        Command("tests", python("gpu_tests.py"), TEST_SECONDS / 60, tests_headline),
        Command("attention", python("attention/gpu_attention.py"), attention_seconds() / 60, attention_headline),
        Command("calibration", calibrate, calibration_seconds(device_gb) / 60, calibration_headline),
        of_32k,
        Command("profile", profile, PROFILE_SECONDS / 60, profile_headline),
        of_128k,
        Command(
            "memory_plan",
            python("activation/gpu_memory_plan.py"),
            memory_plan_seconds(device_gb) / 60,
            memory_plan_headline,
        ),
        Command("training", training, training_seconds() / 60, training_headline),
        Command("merge", python("attention/gpu_merge.py"), (START_SECONDS + COMPILE_SECONDS) / 60, merge_headline),
        Command("slices", python("pipeline/gpu_seq1f1b.py"), slices_seconds(device_gb) / 60, slices_headline),
        Command("moe", python("experts/gpu_moe.py"), MOE_SECONDS / 60, moe_headline),
        Command("host_bound", host_bound, predicted_seconds(bound) / 60, arms_headline),
    ]


def settings_of(device_gb: float, lengths: tuple[int, ...]) -> Settings:
    """Return the defaults of ``gpu_activations.py`` at some lengths."""
    return Settings(
        shape=SHAPE, lengths=lengths, on_cuda=True, host_gb=(100.0,), device_gb=device_gb, num_steps=3,
        link_gb_per_second=55.0, cost_file=None, peak_flops=989e12, arms=MAIN_ARMS, with_sweep=False,
    )  # fmt: skip


def attention_seconds() -> float:
    """Return the seconds of ``gpu_attention.py``: each length on each ring and in one call, both directions."""
    settings = AttentionSettings(
        torch.device("cuda"), torch.bfloat16, (32768, 131072), (1, 2, 4, 8), 32768, 4096, 32, 8, 128, 10
    )
    runs = (settings.repeats + 2) * (len(settings.widths) + 1)
    total = START_SECONDS + COMPILE_SECONDS
    for length in (*settings.lengths, settings.pack_tokens):
        forward = 1e12 * settings.tera_flops([length], backward=False)
        total += runs * (2 * forward / ATTENTION_RATE + 2.5 * forward / BACKWARD_RATE)
    return total


def calibration_seconds(device_gb: float) -> float:
    """Return the seconds of ``gpu_activations_calibrate.py``: each length forward, then forward and backward."""
    loads = loads_of(device_gb, gpu_activations_calibrate.LENGTHS)
    repeats = gpu_activations_calibrate.REPEATS + 1
    steps = sum(2 * load.forward_seconds + load.backward_seconds for load in loads)
    return 2 * START_SECONDS + repeats * steps


def training_seconds() -> float:
    """Return the seconds of ``gpu_training.py``: the corpora, Megatron's start, and steps of the longest documents."""
    shape = replace(SHAPE, num_kv_heads=8)
    step = model_flops(shape, [16384] * (TRAINING_TOKENS // 16384)) / TRAINING_RATE
    return CORPUS_SECONDS + START_OF_MEGATRON_SECONDS + TRAINING_STEPS * step


def slices_seconds(device_gb: float) -> float:
    """Return the seconds of ``gpu_seq1f1b.py``: five measurements of a layer for each length."""
    loads = loads_of(device_gb, SLICED_LENGTHS)
    return START_SECONDS + 4 * 5 * sum(load.forward_seconds + load.backward_seconds for load in loads)


def memory_plan_seconds(device_gb: float) -> float:
    """Return the seconds of ``gpu_memory_plan.py``: a recorded step, then a process for each arm."""
    (load,) = loads_of(device_gb, (gpu_memory_plan.LONGEST,))
    step = load.num_layers * (2 * load.forward_seconds + load.backward_seconds)  # half of it is recomputed
    arms, steps = len(gpu_memory_plan.ARMS), gpu_memory_plan.STEPS + gpu_memory_plan.WARM_UP
    return 2 * START_SECONDS + arms * (START_SECONDS + steps * step)


def loads_of(device_gb: float, lengths: Sequence[int]) -> list[LayerLoad]:
    """Return the load of each length in the model of the activation benchmarks."""
    return [load_of(settings_of(device_gb, (length,)), length) for length in lengths]


def tests_headline(figures: dict[str, Any]) -> str:
    """Return the numbers of tests by outcome, and the first failed test."""
    first = f", first {figures['failures'][0]}" if figures["failures"] else ""
    bad = figures["failed"] + figures["error"]
    return f"{figures['passed']} passed, {bad} failed, {figures['skipped']} skipped{first}"


def profile_headline(figures: dict[str, Any]) -> str:
    """Return the largest error of a prediction for lengths that were not fitted."""
    return f"largest error of unseen lengths {figures['largest_error']:.1%}"


def attention_headline(figures: dict[str, Any]) -> str:
    """Return the worst ratio of a ring to one call of the kernel, and the best rate."""
    worst = max(row["kernel_ratio"] for row in figures["rows"] if row["width"])
    fastest = max(row["teraflops_per_second"] for row in figures["rows"])
    return f"{figures['kernel']}: ring over one call {worst:.3f} at worst, {fastest:.0f} TFLOP/s at best"


def merge_headline(figures: dict[str, Any]) -> str:
    """Return the rates of the two ways to join the most rows in one interval."""
    rows = [row for row in figures["rows"] if row["intervals"] == "one"]
    most = max(row["num_rows"] for row in rows)
    rates = {row["way"]: row["gb_per_second"] for row in rows if row["num_rows"] == most}
    return ", ".join(f"{way} {rate:.0f} GB/s" for way, rate in rates.items())


def moe_headline(figures: dict[str, Any]) -> str:
    """Return the overhead of slots on a balanced rank, and the gain of replicas on a busy rank."""
    overhead, speedup = figures["balanced"]["overhead"], figures["busy"]["speedup"]
    return f"slots {100 * overhead:+.1f} % when balanced, busy rank {speedup:.2f}x as fast with replicas"


def calibration_headline(figures: dict[str, Any]) -> str:
    """Return the speed of the link in both directions together, and the error of the fitted layer."""
    error = max(figures["largest_fit_error"].values())
    shared = figures["shared_link"]["gpus_per_link"]
    return f"link {figures['link_gb_per_second']['each_of_both']:.1f} GB/s, {shared} GPUs per link, fit {error:.1%}"


def arms_headline(figures: dict[str, Any]) -> str:
    """Return the speed of each arm over full recompute, for the last length and host budget."""
    last = (figures["rows"][-1]["num_tokens"], figures["rows"][-1]["host_budget_gb"])
    rows = [row for row in figures["rows"] if (row["num_tokens"], row["host_budget_gb"]) == last]
    seconds = {row["arm"]: row["step_seconds"] for row in rows if "error" not in row}
    whole = seconds["full recompute"]
    return "; ".join(f"{arm} {whole / step:.3f}x" for arm, step in seconds.items() if arm != "full recompute")


def training_headline(figures: dict[str, Any]) -> str:
    """Return tokens and FLOPs per second."""
    return f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['tflops_per_gpu']} TFLOP/s"


def slices_headline(figures: dict[str, Any]) -> str:
    """Return the largest overhead of slices."""
    return f"overhead of slices {max(figures['split_overhead'].values()):+.1%} at worst"


def memory_plan_headline(figures: dict[str, Any]) -> str:
    """Return the reserved memory of each arm that ran."""
    rows = [row for row in figures["rows"] if "error" not in row]
    return ", ".join(f"{row['arm']} {row['peak_reserved_gb']:.1f} GB" for row in rows)
