"""What a resumed run and its checkpoint must agree on, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.bytescale.arguments.batch_schedule import batch_schedule_of
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.checkpoints import RELEASE, arguments_in, flaw_of, is_sharded, to_load


@dataclass(frozen=True)
class Resumption:
    """Megatron's flags of the length of a run, and of the checkpoint that the run resumes from.

    Attributes:
        load: folder of checkpoints.
        ckpt_step: iteration of the checkpoint; None: the last checkpoint.
        non_persistent_ckpt_type: kind of the non-persistent checkpoints, which Megatron loads if they are newer.
        non_persistent_global_ckpt_dir: folder of these checkpoints; None: a subfolder of ``load``.
        finetune: whether iterations are counted anew.
        skip_train: whether nothing is trained.
        train_iters: iterations of the whole training; None: samples are counted.
        train_samples: samples of the whole training.
        global_batch_size: samples of an iteration.
        step_batch_size_schedule: growing sizes of iterations.
        seq_length: maximum number of tokens of a sample.
    """

    load: str | None
    ckpt_step: int | None
    non_persistent_ckpt_type: str | None
    non_persistent_global_ckpt_dir: str | None
    finetune: bool
    skip_train: bool
    train_iters: int | None
    train_samples: int | None
    global_batch_size: int | None
    step_batch_size_schedule: str | None
    seq_length: int

    @property
    def last(self) -> int | None:
        """Last iteration of the training; None if it is not known yet."""
        if self.train_iters:
            return self.train_iters
        if self.train_samples is None:
            return None
        parts = batch_schedule_of(self.step_batch_size_schedule, self.seq_length, 1)
        if not parts:
            return self.train_samples // self.global_batch_size if self.global_batch_size else None
        ends = [start for start, _ in parts[1:]] + [self.train_samples]
        consumed = iterations = 0
        for end, (_, size) in zip(ends, parts, strict=True):
            steps = max(0, -(-(min(end, self.train_samples) - consumed) // size))
            consumed, iterations = consumed + steps * size, iterations + steps
        return iterations

    @property
    def checkpoint(self) -> tuple[int, Path] | None:
        """Iteration and folder of the checkpoint that Megatron loads; None if it counts iterations from 0."""
        if self.load is None or self.finetune:
            return None
        folders = [to_load(Path(self.load), self.ckpt_step)]
        if self.non_persistent_ckpt_type == "global":
            folders.append(to_load(Path(self.non_persistent_global_ckpt_dir or Path(self.load, "non_persistent"))))
        counted = [folder for folder in folders if folder is not None and folder.name != RELEASE]
        return max(((int(folder.name.removeprefix("iter_")), folder) for folder in counted), default=None)


def check_unfinished(run: Resumption) -> None:
    """Raise ValueError if the checkpoint of a resumed run already has all iterations, so that nothing is trained.

    A damaged checkpoint does not count, because another rank may be choosing the checkpoint before it.
    """
    found, last = run.checkpoint, run.last
    if found is None or last is None or found[0] < last or run.skip_train or flaw_of(found[1].parent, found[0]):
        return
    flag = "--train-iters" if run.train_iters else "--train-samples"
    raise ValueError(
        f"--load {run.load}: the training is finished, with {found[0]} of {last} iterations: nothing is left to do. "
        f"Give a larger {flag} to go on, with --override-opt-param-scheduler if the learning rate schedule depends on "
        "it, or --skip-train to evaluate"
    )


@dataclass(frozen=True)
class ExpertStates:
    """Megatron's flags of the experts, and of the states that a run resumes from.

    Attributes:
        load: folder of checkpoints.
        ckpt_step: iteration of the checkpoint; None: the last checkpoint.
        finetune: whether only weights are loaded.
        no_load_optim: whether the optimizer starts with new states.
        num_experts: number of experts per layer.
        expert_model_parallel_size: number of ranks over which experts are distributed.
    """

    load: str | None
    ckpt_step: int | None
    finetune: bool
    no_load_optim: bool | None
    num_experts: int | None
    expert_model_parallel_size: int


@dataclass(frozen=True)
class _SavedExperts:
    """Experts of the run that wrote a checkpoint."""

    num_experts: int | None = None
    expert_model_parallel_size: int = 1


def check_expert_states(run: ExpertStates) -> None:
    """Raise ValueError if the optimizer states of experts in a sharded checkpoint cannot be resumed.

    Megatron groups the parameters of experts separately if several ranks share the experts, and finds no states for
    other groups.
    """
    if run.load is None or not run.num_experts or run.finetune or run.no_load_optim:
        return
    folder = to_load(Path(run.load), run.ckpt_step)
    saved = None if folder is None or folder.name == RELEASE else _saved_experts(folder)
    if saved is None or not saved.num_experts:
        return
    before, now = saved.expert_model_parallel_size, run.expert_model_parallel_size
    if (before > 1) != (now > 1):
        raise ValueError(
            f"--expert-model-parallel-size {now}: the optimizer states of the checkpoint {run.load} are grouped for "
            f"{before}; give {'1' if before == 1 else '2 or more'}, or --no-load-optim to start with new states"
        )


def _saved_experts(folder: Path) -> _SavedExperts | None:
    """Return the experts of a sharded checkpoint; None for other formats, and if it records no arguments."""
    if not is_sharded(folder):
        return None
    try:
        args = arguments_in(folder)
    except ValueError:  # ``check_loaded`` names untrusted classes, and Megatron names damage
        return None
    return None if args is None else options_of(args, _SavedExperts)
