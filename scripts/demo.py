"""``make demo``: train on real text with several ranks, and draw the loss and a timeline in runs/demo/.

The first steps are trained again with static context parallelism; both losses must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescale_ext.draw.charts import Series, draw_loss
from bytescale_ext.draw.timeline import draw_timeline
from bytescale_ext.measure.timeline import COMPUTE_KINDS, read_phases, write_perfetto
from bytescale_ext.new_file import new_log, write_text

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
BYTESCALE = (sys.executable, "-m", "megatron.bytescale.cli")
"""Console command, run from ``ROOT``, where no script of the package needs to be installed."""
# Share of the samples, files and tokens of each corpus: Python files are long, C headers short.
CORPORA = {"python": (0.35, "*.py", 20_000_000), "headers": (0.65, "*.h", 8_000_000)}
TIMELINE_STEP = 14  # rings of 4 and of 2 ranks, and packs
STATIC_STEPS = 5
MODEL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257"
).split()
CONTEXT = "--seq-length 8192 --max-position-embeddings 8192".split()
TRAIN = (
    "--global-batch-size 12 --train-iters 14 --lr 6e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--clip-grad 1.0 --weight-decay 0.1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--log-interval 1 --log-throughput --eval-iters 0 --eval-interval 1000 --split 100,0,0"
).split()
RANKS = (1, 2, 3, 4, 6, 12)
QUIET = ("ignore::UserWarning", "ignore::SyntaxWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@dataclass(frozen=True)
class Demo:
    """Number of ranks, device and folder of a demo.

    Attributes:
        is_static: whether this is the second run, which splits every document over all ranks.
    """

    num_ranks: int
    on_cpu: bool
    folder: Path
    is_static: bool = False

    @property
    def run_folder(self) -> Path:
        """Folder of this run."""
        return self.folder / "static" if self.is_static else self.folder

    @property
    def num_steps(self) -> int:
        """Steps that this run trains."""
        return STATIC_STEPS if self.is_static else int(TRAIN[TRAIN.index("--train-iters") + 1])

    @property
    def device(self) -> str:
        """Name of the ranks' device."""
        return "CPU" if self.on_cpu else "GPU"

    def corpus(self, name: str) -> Path:
        """Return the prefix of a corpus."""
        return self.folder / "corpus" / name

    @property
    def flags(self) -> list[str]:
        """Flags of pretrain_gpt_hdp.py. C is a quarter of the context, or more if few ranks must hold the context."""
        context = int(CONTEXT[1])
        blend = [str(part) for name, (share, _, _) in CORPORA.items() for part in (share, self.corpus(name))]
        flags = [*MODEL, *CONTEXT, *TRAIN, "--data-path", *blend, "--hybrid-data-parallel"]
        flags += ["--hdp-tokens-per-rank", str(max(context // 4, -(-context // self.num_ranks)))]
        flags += ["--hdp-log-dir", str(self.run_folder)]
        if self.is_static:  # the learning rates of the whole run
            flags += ["--hdp-static-width", str(self.num_ranks), "--exit-interval", str(STATIC_STEPS)]
        else:
            flags += ["--hdp-timeline-step", str(TIMELINE_STEP)]
            flags += ["--tensorboard-dir", str(self.folder / "tensorboard")]
        return [*flags, "--cpu"] if self.on_cpu else [*flags, "--bf16"]

    @property
    def command(self) -> list[str]:
        """Training command."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_ranks}"]
        return [*launch, str(ROOT / "pretrain_gpt_hdp.py"), *self.flags]

    @property
    def key(self) -> str:
        """Hash of this script and the command. A finished run with the same hash is skipped."""
        command = "\0".join(self.command[1:]).encode()
        return hashlib.sha256(Path(__file__).read_bytes() + command).hexdigest()[:16]


def num_gpus() -> int:
    """Return the number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def packages_folder() -> str:
    """Return the folder of this environment's packages: where torch is, on machines that add it to the path too."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    return str(Path(torch.origin).resolve().parents[1])


def build_corpora(demo: Demo, tell: Callable[[str], object]) -> None:
    """Write each missing corpus from the source files of this environment's packages; report lines to ``tell``."""
    for name, (_, pattern, num_tokens) in CORPORA.items():
        prefix = demo.corpus(name)
        if prefix.with_suffix(".idx").exists():
            tell(f"corpus: {shown(prefix)} exists")
            continue
        command = [*BYTESCALE, "corpus", "--output", str(prefix), "--json", "--from", packages_folder(),
                   "--glob", pattern, "--tokens", str(num_tokens)]  # fmt: skip
        tell(f"corpus: reading the {pattern} files of this environment")
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"the corpus could not be written:\n{done.stderr[-2000:]}")
        figures = json.loads(done.stdout)
        tell(
            f"corpus: {figures['num_documents']:,} {pattern} files, {figures['num_tokens']:,} bytes as tokens -> "
            f"{shown(prefix)}"
        )


def train(demo: Demo, console: Console) -> None:
    """Run the training command with a progress bar; Megatron's log goes to the folder of the run."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    log, metrics_path = demo.run_folder / "train.log", demo.run_folder / "metrics.jsonl"
    demo.run_folder.mkdir(parents=True, exist_ok=True)
    for stale in (metrics_path, *(demo.run_folder / "timeline").glob("rank*.jsonl")):
        stale.unlink(missing_ok=True)
    # With more threads than cores, ranks wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ",".join(QUIET)}
    words = "static context parallelism" if demo.is_static else "training"
    columns = ("{task.description}", BarColumn(), "{task.completed:.0f}/{task.total}", TimeRemainingColumn(),
               TextColumn("{task.fields[figures]}"))  # fmt: skip
    with new_log(log) as output, Progress(*columns, console=console) as progress:
        task = progress.add_task("starting Megatron", total=demo.num_steps, figures="")
        process = subprocess.Popen(demo.command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        try:
            while process.poll() is None:
                time.sleep(0.3)
                steps = read_metrics(metrics_path)
                if steps:
                    last = steps[-1]
                    figures = f"loss {last['lm loss']:.3f}  {last['tokens_per_second']:,.0f} tokens/s"
                    progress.update(task, description=words, completed=len(steps), figures=figures)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"training ended with exit code {process.returncode}; the end of {shown(log)}:\n{tail}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def draw(demo: Demo, steps: Sequence[dict[str, Any]], static: Sequence[dict[str, Any]]) -> None:
    """Write loss.png, timeline.png and timeline.json. ``static``: steps of the run with static context parallelism."""
    curve, marks = (([s["iteration"] for s in run], [s["lm loss"] for s in run]) for run in (steps, static))
    reference = Series("static context parallelism, the same documents", *marks)
    draw_loss(*curve, demo.folder / "loss.png", "loss of hybrid data parallelism", reference)
    phases = read_phases(demo.folder / "timeline", TIMELINE_STEP)
    title = f"step {TIMELINE_STEP} on {demo.num_ranks} {demo.device} ranks"
    draw_timeline(phases, demo.folder / "timeline.png", title)
    write_perfetto(phases, demo.folder / "timeline.json")


def summarize(demo: Demo, steps: Sequence[dict[str, Any]], static: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the run; means exclude the first step, which warms up."""
    steady = steps[1:] or steps
    mean = {name: sum(s[name] for s in steady) / len(steady) for name in
            ("tokens_per_second", "planned_imbalance", "measured_imbalance", "padding_share")}  # fmt: skip
    # Equal steps of both runs, without the step that warms up.
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(steps[1:], static[1:], strict=False)]
    shards = [s for phase in read_phases(demo.folder / "timeline", TIMELINE_STEP)
              if phase.kind in COMPUTE_KINDS for s in phase.shards]  # fmt: skip
    return {
        "key": demo.key,
        "num_ranks": demo.num_ranks,
        "num_steps": len(steps),
        "first_loss": steps[0]["lm loss"],
        "last_loss": steps[-1]["lm loss"],
        "largest_loss_difference_to_static": max(
            abs(a["lm loss"] - b["lm loss"]) for a, b in zip(steps, static, strict=False)
        ),
        **{name: round(value, 4) for name, value in mean.items()},
        "speed_over_static": [round(f(ratios), 2) for f in (min, statistics.median, max)],
        "micro_batches_per_rank": [round(sum(counts) / len(steady), 2) for counts in
                                   zip(*(s["micro_batches_per_rank"] for s in steady), strict=True)],
        "ring_widths_of_timeline": sorted({len(shard.ring) for shard in shards}),
        "shortest_and_longest_of_timeline": [min(s.length for s in shards), max(s.length for s in shards)],
    }  # fmt: skip


def show(demo: Demo, summary: dict[str, Any], console: Console) -> None:
    """Print the summary as a table."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    shortest, longest = summary["shortest_and_longest_of_timeline"]
    lowest, median, highest = summary["speed_over_static"]
    rows = {
        "loss": f"{summary['first_loss']:.3f} -> {summary['last_loss']:.3f} in {summary['num_steps']} steps; "
        f"static context parallelism differs by at most {summary['largest_loss_difference_to_static']:.1g} "
        f"in the first {STATIC_STEPS}",
        "speed": f"{summary['tokens_per_second']:,.0f} tokens/s on {demo.num_ranks} {demo.device} ranks",
        "over static": f"{median:.2f} times as fast in the median of steps 2 to {STATIC_STEPS}, {lowest:.2f} to "
        f"{highest:.2f}; one machine has no slow links, which is where most can be gained",
        "micro-batches": "  ".join(f"{count:g}" for count in summary["micro_batches_per_rank"])
        + "  (per rank, mean of a step)",
        "imbalance": f"planned {summary['planned_imbalance']:.2f}, measured {summary['measured_imbalance']:.2f} "
        "(busiest rank / mean)",
        "padding": f"{100 * summary['padding_share']:.2f} %",
        f"step {TIMELINE_STEP}": f"documents of {shortest:,} to {longest:,} tokens, "
        f"rings of {', '.join(map(str, summary['ring_widths_of_timeline']))} ranks",
        "files": f"{shown(demo.folder)}/: train.log, loss.png, timeline.png, timeline.json (open in ui.perfetto.dev), "
        "tensorboard/, metrics.jsonl, summary.json",
        "next": "sudo make cluster: both on an emulated cluster with links, in five minutes",
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)


def shown(path: Path) -> str:
    """Return a path relative to the working directory."""
    return os.path.relpath(path, Path.cwd())


def main() -> int:
    """Build the corpora, train, draw and summarize. A second call skips finished parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks",
        type=int,
        choices=RANKS,
        default=4,
        help="number of ranks, a divisor of a step's documents (%(default)s); on GPUs if there are enough",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="folder of the run (runs/demo)")
    args = parser.parse_args()
    from rich.console import Console

    console = Console()
    demo = Demo(args.ranks, on_cpu=num_gpus() < args.ranks, folder=args.output.resolve())
    try:
        demo.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {args.output}: no folder can be made there ({error.strerror})")
    summary_path = demo.folder / "summary.json"
    try:
        build_corpora(demo, console.print)
        summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
        if summary.get("key") == demo.key:
            console.print(f"training: done already; remove {shown(demo.folder)} to train again")
        else:
            runs = []
            for run in (demo, replace(demo, is_static=True)):
                train(run, console)
                runs.append(read_metrics(run.run_folder / "metrics.jsonl"))
            draw(demo, *runs)
            summary = summarize(demo, *runs)
            write_text(summary_path, json.dumps(summary, indent=2) + "\n")
    except RuntimeError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    show(demo, summary, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
