"""Features that were trained together: the runs of a test session, and their table in docs/results/tested.md.

    BYTESCALE_TESTED=runs/tested.jsonl make test-all
    .venv/bin/python -m tests.e2e.tested runs/tested.jsonl

``tests.e2e.training`` appends the flags of each successful run with hybrid data parallelism to the file that the
variable names. Rows and columns of the table are features. A cell has the number of runs with both features.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FILE = "BYTESCALE_TESTED"  # environment variable
PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "tested.md"
BEGIN, END = "<!-- tested: begin -->", "<!-- tested: end -->"

Flags = Mapping[str, tuple[str, ...]]
Has = Callable[[Flags], bool]


def given(*names: str) -> Has:
    """Return whether a run has one of these flags."""
    return lambda flags: any(name in flags for name in names)


def more_than_one(name: str) -> Has:
    """Return whether the value of a flag is above 1."""
    return lambda flags: int(flags.get(name, ("1",))[0]) > 1


def is_one_of(name: str, *values: str) -> Has:
    """Return whether a flag has one of these values."""
    return lambda flags: flags.get(name, ("",))[0] in values


def has_virtual_stages(flags: Flags) -> bool:
    """Return whether stages have several chunks: by their number, or by a layout with more parts than stages."""
    stages = int(flags.get("--pipeline-model-parallel-size", ("1",))[0])
    layout = flags.get("--pipeline-model-parallel-layout", ("",))[0]
    number = given("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
    return number(flags) or layout.count("|") >= stages


def has_policy(flags: Flags) -> bool:
    """Return whether activations are swapped or recomputed by a policy of ours."""
    shares = given("--swap-fraction", "--recompute-fraction")(flags)
    return shares or flags.get("--activation-policy", ("none",))[0] != "none"


COLUMNS: dict[str, Has] = {
    "tensor parallelism": more_than_one("--tensor-model-parallel-size"),
    "sharded optimizer": given("--use-distributed-optimizer"),
    "pipelines": more_than_one("--pipeline-model-parallel-size"),
    "virtual stages": has_virtual_stages,
    "slices": given("--seq1f1b-slices"),
    "recompute": given("--recompute-granularity"),
    "activation policy": has_policy,
    "loss in chunks": given("--chunked-cross-entropy"),
    "experts": given("--num-experts"),
    "states in pages": given("--state-policy"),
}
"""Features of the distribution of a model."""

YARN = is_one_of("--position-embedding-type", "yarn")

ROWS: dict[str, Has] = {
    "any model": lambda flags: True,
    **COLUMNS,
    "sequence parallelism": given("--sequence-parallel"),
    "kept keys in slices": given("--hdp-kept-keys"),
    "zero bubble": given("--seq1f1b-zero-bubble"),
    "rings over nodes": given("--hdp-hierarchical-rings"),
    "static context parallelism": given("--hdp-static-width"),
    "bf16 or fp16": given("--bf16", "--fp16"),
    "LayerNorm, GELU, biases": is_one_of("--normalization", "LayerNorm"),
    "learned positions, or none": is_one_of("--position-embedding-type", "learned_absolute", "none"),
    "YaRN, or scaled rope": lambda flags: "--use-rope-scaling" in flags or YARN(flags),
    "q/k norm": given("--qk-layernorm"),
    "sliding windows": given("--window-size"),
    "attention sinks": given("--softmax-type"),
    "latent attention": given("--multi-latent-attention"),
    "multi-token prediction": given("--mtp-num-layers"),
    "expert parallelism": more_than_one("--expert-model-parallel-size"),
    "replicas of experts": given("--moe-expert-slots"),
    "gates that start dense": given("--moe-dts-steps"),
    "chats": given("--sft"),
    "windows of related documents": given("--sculpt-windows"),
    "text that Ray actors load": is_one_of("--hdp-loader", "ray"),
    "batches by tokens, or that grow": given("--hdp-global-tokens", "--rampup-batch-size"),
    "draft heads": given("--draft-heads"),
    "n-gram memory": given("--ngram-layers"),
    "embedding in host memory": lambda flags: "embedding" in flags.get("--host-tables", ()),
    "evaluation": lambda flags: int(flags.get("--eval-iters", ("0",))[0]) > 0,
}
"""These features, and features of models and data."""


def flags_of(argv: Sequence[str]) -> Flags:
    """Return the flags of a command with their values. The last value of a flag counts, as in Megatron's parser."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = (value,) if value else ()
        elif name:
            found[name] += (word,)
    return found


def note(argv: Sequence[str]) -> None:
    """Append the flags of a successful run to the file of ``BYTESCALE_TESTED``, if the variable is set."""
    if FILE in os.environ and "--hybrid-data-parallel" in argv:
        line = json.dumps([word for word in argv if "/" not in word]) + "\n"
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:  # one short write, so lines stay whole
            file.write(line)


def table(runs: Sequence[Flags]) -> str:
    """Return the table with the number of runs that had the features of a row and of a column."""
    head = "| with hybrid data parallelism | runs | " + " | ".join(COLUMNS) + " |"
    lines = [head, "|---" * (len(COLUMNS) + 2) + "|"]
    for title, has in ROWS.items():
        mine = [flags for flags in runs if has(flags)]
        counts = [sum(map(column, mine)) for column in COLUMNS.values()]
        cells = [str(count) if count else "" for count in (len(mine), *counts)]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(page: str, runs: Sequence[Flags]) -> str:
    """Return the page with its table replaced by the table of these runs."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(runs)}\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str], page: Path = PAGE) -> None:
    """Write the table of the given file, and print the features that no run had."""
    runs = [flags_of(json.loads(line)) for line in Path(argv[0]).read_text(encoding="utf-8").splitlines()]
    page.write_text(with_table(page.read_text(encoding="utf-8"), runs), encoding="utf-8")
    missing = [title for title, has in ROWS.items() if not any(map(has, runs))]
    print(f"{len(runs)} runs; none with: {', '.join(missing) or '-'}")


if __name__ == "__main__":
    main(sys.argv[1:])
