"""What a running training reads of Megatron's arguments: sizes of batches, progress, and checks of losses.

Read them with ``options.current``. Megatron changes some of them while it trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.bytescale.arguments.options import current


@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        curr_iteration: index of the running step, from 0; None before the first step.
    """

    curr_iteration: int | None = None


def running_step() -> int:
    """Return the index of the running step, from 0. A step must have begun."""
    step = current(Progress).curr_iteration
    assert step is not None, "no step has begun"
    return step


@dataclass(frozen=True)
class Batches:
    """Samples of a step, and those that are consumed.

    Attributes:
        global_batch_size: samples of a training step.
        eval_global_batch_size: samples of an evaluation step; None or 0: as many as in training.
        consumed_train_samples: samples that training has consumed.
        consumed_valid_samples: samples that evaluations have consumed.
        iteration: steps that are done.
        train_iters: steps of the whole training.
    """

    global_batch_size: int
    eval_global_batch_size: int | None
    consumed_train_samples: int
    consumed_valid_samples: int
    iteration: int
    train_iters: int

    @property
    def evaluation(self) -> int:
        """Samples of an evaluation step."""
        return self.eval_global_batch_size or self.global_batch_size


@dataclass(frozen=True)
class SampleBatches:
    """Micro-batches of samples of one length, and the ranks that share them.

    Attributes:
        seq_length: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
        context_parallel_size: ranks that share a sample.
        data_parallel_size: ranks with micro-batches of their own.
        create_attention_mask_in_dataloader: samples come with masks.
    """

    seq_length: int
    micro_batch_size: int
    context_parallel_size: int
    data_parallel_size: int
    create_attention_mask_in_dataloader: bool = False


@dataclass(frozen=True)
class LossChecks:
    """Checks of each loss.

    Attributes:
        check_for_nan_in_loss_and_grad: losses that are no numbers end the run.
        check_for_spiky_loss: sudden large losses are reported.
    """

    check_for_nan_in_loss_and_grad: bool
    check_for_spiky_loss: bool = False


@dataclass(frozen=True)
class LossDivision:
    """How Megatron divides losses.

    Attributes:
        calculate_per_token_loss: once, by the labels of a step; else by micro-batch.
    """

    calculate_per_token_loss: bool


@dataclass(frozen=True)
class Messages:
    """How pipeline stages send messages.

    Attributes:
        overlap_p2p_comm: messages overlap with computation.
    """

    overlap_p2p_comm: bool


@dataclass(frozen=True)
class RandomStates:
    """What decides whether a resumed run repeats its random numbers.

    Attributes:
        hidden_dropout: share of hidden states that dropout sets to 0.
        save: folder of checkpoints.
        data_parallel_random_init: checkpoints hold the random state of every rank.
    """

    hidden_dropout: float
    save: Path | None
    data_parallel_random_init: bool


@dataclass(frozen=True)
class Interruptions:
    """What to tell the user when a run ends early.

    Attributes:
        distributed_timeout_minutes: minutes after which a silent rank ends all.
        save: folder of checkpoints.
    """

    distributed_timeout_minutes: float
    save: str | None = None


@dataclass(frozen=True)
class SampleKind:
    """What the samples of a run are; checkpoints of runs without our features lack the first three.

    Attributes:
        sculpt_windows: files of windows.
        trains_on_answers: samples are conversations.
        hybrid_data_parallel: samples are documents.
        seq_length: tokens of a sample of Megatron's.
        consumed_train_samples: samples that training has consumed.
    """

    seq_length: int
    sculpt_windows: tuple[Path, ...] | None = None
    trains_on_answers: bool = False
    hybrid_data_parallel: bool = False
    consumed_train_samples: int = 0

    def __str__(self) -> str:
        """Return what a sample is, in the plural."""
        if self.sculpt_windows:
            return f"windows of {', '.join(file.name for file in self.sculpt_windows)}"
        if self.trains_on_answers:
            return "conversations"
        return "documents" if self.hybrid_data_parallel else f"windows of {self.seq_length:,} tokens"
