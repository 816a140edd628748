"""The subset of Megatron's arguments that a running training reads: batch sizes, progress, and checks of losses.

Read them with ``options.current``. Megatron changes some of them while it trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bytescale_ext.data.samples.epochs import NO_LIMIT, SHUFFLE_LIMIT
from megatron.bytescale.arguments.options import current


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training.

    Attributes:
        curr_iteration: index of the current step, from 0; None before the first step.
    """

    curr_iteration: int | None = None


def running_step() -> int:
    """Return the index of the current step, from 0. A step must have begun."""
    step = current(TrainingProgress).curr_iteration
    assert step is not None, "no step has begun"
    return step


@dataclass(frozen=True)
class Batches:
    """The samples of a step, and the samples consumed so far.

    Attributes:
        global_batch_size: samples of a training step.
        eval_global_batch_size: samples of an evaluation step; None or 0: as many as in training.
        consumed_train_samples: samples that training has consumed.
        consumed_valid_samples: samples that evaluations have consumed.
        iteration: number of finished steps.
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
        """The number of samples in an evaluation step."""
        return self.eval_global_batch_size or self.global_batch_size


@dataclass(frozen=True)
class SampleBatches:
    """Micro-batches of fixed-length samples, and the ranks that share them.

    Attributes:
        seq_length: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
        context_parallel_size: ranks that share a sample.
        data_parallel_size: ranks with different micro-batches.
        create_attention_mask_in_dataloader: whether samples include masks.
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
        check_for_nan_in_loss_and_grad: whether a loss of NaN or infinity ends the run.
        check_for_spiky_loss: whether sudden large losses are reported.
    """

    check_for_nan_in_loss_and_grad: bool
    check_for_spiky_loss: bool = False


@dataclass(frozen=True)
class LossDivision:
    """The division of losses in Megatron.

    Attributes:
        calculate_per_token_loss: whether to divide once by the labels of a step; otherwise by micro-batch.
    """

    calculate_per_token_loss: bool


@dataclass(frozen=True)
class Messages:
    """Settings of the messages between pipeline stages.

    Attributes:
        overlap_p2p_comm: whether messages overlap with computation.
    """

    overlap_p2p_comm: bool


@dataclass(frozen=True)
class Dropout:
    """Settings of dropout.

    Attributes:
        hidden_dropout: share of hidden states that dropout sets to 0.
        seed: seed of the masks.
    """

    hidden_dropout: float
    seed: int


@dataclass(frozen=True)
class SavedFolders:
    """Folders of the checkpoints that a training writes.

    Attributes:
        save: folder of ``--save``.
        non_persistent_save_interval: steps between two checkpoints that are soon deleted.
        non_persistent_global_ckpt_dir: folder of these checkpoints; None: a subfolder of ``save``.
    """

    save: str | None
    non_persistent_save_interval: int | None = None
    non_persistent_global_ckpt_dir: str | None = None

    def paths(self) -> list[Path]:
        """Return the folders."""
        if self.save is None:
            return []
        soon_deleted = Path(self.non_persistent_global_ckpt_dir or Path(self.save, "non_persistent"))
        return [Path(self.save), *([soon_deleted] if self.non_persistent_save_interval else [])]


@dataclass(frozen=True)
class Interruptions:
    """Settings that appear in the message about a run that ends early.

    Attributes:
        distributed_timeout_minutes: minutes after which a silent rank ends the run.
        save: folder of checkpoints.
        load: folder of the checkpoint that the run resumes from.
    """

    distributed_timeout_minutes: float
    save: str | None = None
    load: str | None = None


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint's arguments know about the run so far.

    Attributes:
        hdp_learned_costs: ``bytescale_ext.measure.learning.state_of``; None: the run learned nothing.
        hdp_tokens_so_far: tokens that the run has trained on.
    """

    hdp_learned_costs: dict[str, object] | None = None
    hdp_tokens_so_far: int = 0


@dataclass(frozen=True)
class OrderOfSamples:
    """Order of the samples, which no flag sets and checkpoints record.

    Attributes:
        hdp_shuffle_limit: most samples of an epoch whose order is a shuffled array (``sample_order``).
    """

    hdp_shuffle_limit: int = SHUFFLE_LIMIT


@dataclass(frozen=True)
class SavedOrder:
    """``OrderOfSamples`` of a checkpoint; without one, all epochs were shuffled arrays."""

    hdp_shuffle_limit: int = NO_LIMIT


@dataclass(frozen=True)
class SampleKind:
    """The kind of a run's samples; checkpoints of runs without our features lack the first three arguments.

    Attributes:
        sculpt_windows: files of windows.
        trains_on_answers: whether samples are conversations.
        hybrid_data_parallel: whether samples are documents.
        seq_length: tokens of one of Megatron's samples.
        consumed_train_samples: samples that training has consumed.
    """

    seq_length: int
    sculpt_windows: tuple[Path, ...] | None = None
    trains_on_answers: bool = False
    hybrid_data_parallel: bool = False
    consumed_train_samples: int = 0

    def __str__(self) -> str:
        """Return the name of the samples' kind, in the plural."""
        if self.sculpt_windows:
            return f"windows of {', '.join(file.name for file in self.sculpt_windows)}"
        if self.trains_on_answers:
            return "conversations"
        return "documents" if self.hybrid_data_parallel else f"windows of {self.seq_length:,} tokens"
