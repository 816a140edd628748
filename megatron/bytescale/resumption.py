"""What a resumed run and its checkpoint must agree on, checked before anything is built."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.bytescale.arguments.batch_schedule import batch_schedule_of
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.checkpoints import RELEASE, arguments_in, flaw_of, is_sharded, step_of, to_load


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


@dataclass(frozen=True)
class Source:
    """Megatron's flags of the checkpoint whose weights a run begins with.

    Attributes:
        load: folder of checkpoints.
        ckpt_step: iteration of the checkpoint; None: the last checkpoint.
        pretrained_checkpoint: folder that is read if ``load`` has no checkpoint.
        finetune: whether only weights are loaded.
        non_persistent_ckpt_type: kind of the non-persistent checkpoints.
        enable_msc: whether folders may be addresses of a store.
    """

    load: str | None
    ckpt_step: int | None
    pretrained_checkpoint: str | None
    finetune: bool
    non_persistent_ckpt_type: str | None
    enable_msc: bool


def check_source(run: Source) -> None:
    """Raise ValueError if a run that names a checkpoint would begin with random weights.

    A run without ``--finetune`` may begin with a missing or empty ``--load``, so that its first start has the command
    of all later ones.
    """
    if run.load is None and run.ckpt_step is not None:
        raise ValueError(f"--ckpt-step {run.ckpt_step} needs --load, the folder of the checkpoint")
    if run.enable_msc or run.non_persistent_ckpt_type:
        return
    if run.load is not None and (step := step_of(Path(run.load))) is not None:
        raise ValueError(f"--load {run.load} is one checkpoint: give --load {Path(run.load).parent} --ckpt-step {step}")
    if run.load is not None and to_load(Path(run.load), run.ckpt_step) is not None:
        return
    if run.pretrained_checkpoint is not None:
        if to_load(Path(run.pretrained_checkpoint)) is None:
            raise ValueError(f"--pretrained-checkpoint {run.pretrained_checkpoint} has no checkpoint: correct the path")
    elif run.finetune:
        folder = "needs --load, the folder of a checkpoint" if run.load is None else f"--load {run.load} has none"
        raise ValueError(f"--finetune begins with the weights of a checkpoint: {folder}")


@dataclass(frozen=True)
class ModelFunction:
    """Arguments of the model that checkpoints of other values fit, because no tensor has another shape."""

    untie_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_seq_len_interpolation_factor: float | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_type: str | None = None
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    swiglu: bool = False
    squared_relu: bool = False
    quick_geglu: bool = False
    window_size: tuple[int, ...] | None = None
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None


@dataclass(frozen=True)
class _Rows:
    """Arguments of the vocabulary's rows, in a checkpoint or in a run."""

    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    tensor_model_parallel_size: int = 1


def check_model(run: Source, now: ModelFunction, num_tokens: int, padded: int) -> str | None:
    """Check that a resumed run has the model of its sharded checkpoint, where Megatron would load another.

    Args:
        run: the checkpoint of the run.
        now: the model of the run.
        num_tokens: number of tokens in the vocabulary of the run.
        padded: number of rows of its embedding.

    Returns:
        A warning about settings that make another function of the same weights; None without any.

    Raises:
        ValueError: the checkpoint has an output layer of its own and the run has none, or the reverse, or the
            checkpoint is of another vocabulary.
    """
    if run.load is None or run.finetune:
        return None
    folder = to_load(Path(run.load), run.ckpt_step)
    args = None if folder is None else _saved_arguments(folder)
    if args is None:
        return None
    saved, rows = options_of(args, ModelFunction), options_of(args, _Rows)
    if saved.untie_embeddings_and_output_weights != now.untie_embeddings_and_output_weights:
        change = "add" if saved.untie_embeddings_and_output_weights else "remove"
        raise ValueError(
            f"the checkpoint {run.load} was written {'with' if change == 'add' else 'without'} "
            f"--untie-embeddings-and-output-weights: {change} it, or give --finetune"
        )
    multiple = rows.make_vocab_size_divisible_by * rows.tensor_model_parallel_size
    before = rows.padded_vocab_size
    if before and padded != before and -(-num_tokens // multiple) * multiple != before:
        raise ValueError(
            f"the checkpoint {run.load} has {before:,} rows for the tokens of its vocabulary, and this run has "
            f"{num_tokens:,} tokens: give the tokenizer that the checkpoint was trained with, or --finetune"
        )
    others = [field.name for field in fields(now) if getattr(saved, field.name) != getattr(now, field.name)]
    if not others:
        return None
    flags = {name: f"--{name.replace('_', '-').replace('layernorm', 'norm')}" for name in others}
    changes = [f"{flags[name]} {getattr(saved, name)} (now {getattr(now, name)})" for name in others]
    return f"WARNING: the checkpoint {run.load} was written with {', '.join(changes)}: its weights get another function"


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
    saved = None if folder is None else _saved_experts(folder)
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
    args = _saved_arguments(folder)
    return None if args is None else options_of(args, _SavedExperts)


def _saved_arguments(folder: Path) -> argparse.Namespace | None:
    """Return the arguments in a sharded checkpoint; None for other formats, and if it records none."""
    if folder.name == RELEASE or not is_sharded(folder):
        return None
    try:
        return arguments_in(folder)
    except ValueError:  # ``check_loaded`` names untrusted classes, and Megatron names damage
        return None
