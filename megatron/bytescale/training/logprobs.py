"""Log-probabilities of the tokens of a data set: forward passes with the plans, rings, slices and stages of a training.

The run is an evaluation of Megatron's. Its loader reads the documents in their order, and the loss of each token is
recorded on the last stage. The first process writes the numbers after each step, so that a killed run goes on where it
was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.data.corpus.sidecar import HEADER, LOGPROBS, VALUES, identity_of, write_header
from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.data.samples.lengths import check_indexed_dataset, read_idx_lengths
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.json_input import json_settings, stored_text, whole
from bytescale_ext.new_file import new_log, overwritten, write_text
from bytescale_ext.plan.setup.planner import planner_of
from megatron.bytescale.arguments.data import DataArguments
from megatron.bytescale.arguments.options import current
from megatron.bytescale.core.datasets.document_dataset import read_document
from megatron.bytescale.core.packed_seq_params import PackedUnit
from megatron.bytescale.features.hdp.build import common_settings, own_plan_maker
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.stock import ForwardStep, LossFunction

PROGRESS = ".progress.json"


@dataclass(frozen=True)
class Task:
    """The data set, the sidecar and the model.

    Attributes:
        prefix: prefix of the data set.
        output: path of the sidecar, without suffix.
        model: name of the checkpoint, which a resumed run must have too.
        documents_per_step: documents of a step on all ranks.
    """

    prefix: str
    output: str
    model: str
    documents_per_step: int


@dataclass(frozen=True)
class Progress:
    """Progress of a run that may have been killed.

    Attributes:
        model: name of the checkpoint.
        data_sha256: identity of the data set.
        num_documents: documents whose numbers are written.
    """

    model: str
    data_sha256: str
    num_documents: int = 0

    @classmethod
    def of(cls, task: Task) -> Progress:
        """Return the progress of the run before, or none. Raises ValueError if it had another model or data set."""
        begun = cls(task.model, identity_of(task.prefix))
        path = task.output + PROGRESS
        if not os.path.exists(path):
            return begun
        try:
            found = cls(**json_settings(stored_text(path)))
            num_documents = check_indexed_dataset(task.prefix).num_documents
            if not 0 <= whole(found.num_documents) <= num_documents:
                raise ValueError(f"{found.num_documents} of {num_documents} documents")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not the progress of a run ({error}): delete it") from error
        if (found.model, found.data_sha256) != (begun.model, begun.data_sha256):
            raise ValueError(f"{path} is of another model or data set ({found.model}): delete it, or change --output")
        wanted = 4 * check_indexed_dataset(task.prefix).num_tokens
        if not os.path.exists(task.output + VALUES) or os.path.getsize(task.output + VALUES) != wanted:
            raise ValueError(f"{path}: {task.output + VALUES} has other bytes than {wanted}: delete both")
        return found


class DocumentsInOrder:
    """A ``TokenSource`` of the documents of a data set in their order, except empty ones.

    Attributes:
        documents: document of each sample: [n].
        first_tokens: first token of each document in the data set: [documents].
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self._data = prefix, IndexedDataset(prefix, multimodal=False, mmap=True)
        self._lengths = read_idx_lengths(prefix)
        self.first_tokens = np.cumsum(self._lengths) - self._lengths
        self.documents = np.flatnonzero(self._lengths)

    def __len__(self) -> int:
        return len(self.documents)

    def length(self, sample_id: int) -> int:
        """Return the number of tokens of a document."""
        return int(self._lengths[self.documents[sample_id]])

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return tokens of a document, int64 [stop - start], one fewer past its end."""
        return read_document(self._data, int(self.documents[sample_id]), start, stop)

    def describe(self, sample_id: int) -> str:
        """Return the name of a document, for messages."""
        return f"{self._prefix}: document {int(self.documents[sample_id])}"


@dataclass
class Recorder:
    """Collects the log-probabilities of a step on every rank and writes them on the first.

    Attributes:
        task: the data set and the sidecar.
        source: its documents.
        done: documents that the sidecar has.
        places, numbers: token of the data set and log-probability of each recorded row: [n] each.
        step: step whose rows are recorded; None before the first.
    """

    task: Task
    source: DocumentsInOrder
    done: Progress
    places: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)
    step: StepBatch | None = None

    def begin(self) -> None:
        """Make the file of the numbers, with 0 for each token, unless the run before has made it.

        Raises ValueError if somebody has replaced that file by a link.
        """
        path = Path(self.task.output + VALUES)
        if self.done.num_documents and path.is_symlink():
            raise ValueError(f"{path}: is a link, whose target is not overwritten: remove it, or give another --output")
        Path(self.task.output + HEADER).unlink(missing_ok=True)  # the sidecar is not complete
        if not self.done.num_documents:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_log(path, is_binary=True) as file:
                file.truncate(4 * check_indexed_dataset(self.task.prefix).num_tokens)

    def add(self, step: StepBatch, packed: PackedMicroBatch, losses: torch.Tensor) -> None:
        """Record the log-probabilities of the labels of a micro-batch or slice.

        ``losses``: minus the log-probability of each label, after the losses of multi-token prediction: [..., rows].
        """
        if parallel_state.get_tensor_model_parallel_rank():
            return
        rows = [
            self.source.first_tokens[self.source.documents[step.sample_ids[shard.seq]]] + np.arange(start, stop) + 1
            for shard in packed.micro_batch.shards
            for start, stop in shard.ranges
        ]
        if not rows:
            return
        places = np.concatenate(rows)
        has_label = packed.loss_mask[: len(places)].cpu().numpy() != 0
        numbers = -losses.reshape(-1)[-packed.num_rows :][: len(places)].float().cpu().numpy()
        self.places.append(places[has_label])
        self.numbers.append(numbers[has_label])

    def write(self) -> None:
        """Send the numbers of the step to the first process, which writes them. Collective over all processes."""
        step, self.step = self.step, None
        if step is None:
            return
        mine = [np.concatenate(part) if part else np.zeros(0) for part in (self.places, self.numbers)]
        self.places.clear()
        self.numbers.clear()
        is_first = torch.distributed.get_rank() == 0
        found: list[Any] | None = [None] * torch.distributed.get_world_size() if is_first else None
        torch.distributed.gather_object(mine, found)
        self.done = replace(self.done, num_documents=max(step.sample_ids) + 1)
        if found is None:
            return
        self.overwrite(found)
        write_text(self.task.output + PROGRESS, json.dumps(asdict(self.done)) + "\n")

    def overwrite(self, found: Iterable[Sequence[np.ndarray]]) -> None:
        """Overwrite numbers in the file. Raises OSError if somebody has replaced it by a link since ``begin``.

        ``found``: pairs of places, [n], and their numbers, [n].
        """
        with overwritten(self.task.output + VALUES) as file:
            numbers = np.memmap(file, dtype=np.float32, mode="r+")
            for places, values in found:
                numbers[places.astype(np.int64)] = values
            numbers.flush()

    def end(self) -> None:
        """Write the last step and the header, which makes the sidecar complete. Collective over all processes."""
        self.write()
        if torch.distributed.get_rank() == 0:
            write_header(self.task.output, self.task.prefix, LOGPROBS, "float32")
            Path(self.task.output + PROGRESS).unlink(missing_ok=True)


class RecordedSteps(StepLoader):
    """Steps of the documents in their order; each begins after the numbers of the step before are written."""

    recorder: Recorder

    def __next__(self) -> StepBatch:
        self.recorder.write()
        self.recorder.step = super().__next__()
        return self.recorder.step


def record(recorder: Recorder, training: Training, runtime: Runtime) -> Training:
    """Change a training so that its evaluation records log-probabilities.

    Raises:
        ValueError: a document is longer than ``--seq-length``.
    """
    longest = check_indexed_dataset(recorder.task.prefix).max_tokens
    if longest > current(DataArguments).seq_length:
        raise ValueError(
            f"{recorder.task.prefix}: a document has {longest} tokens: raise --seq-length "
            f"{current(DataArguments).seq_length}"
        )
    provider = partial(_loaders, recorder, runtime)
    provider.is_distributed = True  # type: ignore[attr-defined]  # every rank reads its own tokens
    return replace(
        training, dataset_provider=provider, forward_step=_recording(recorder, runtime, training.forward_step)
    )


def _loaders(
    recorder: Recorder, runtime: Runtime, num_samples: Sequence[int | None], vp_stage: int | None = None
) -> tuple[StepLoader | None, ...]:
    """Return the loader of the evaluation; all chunks of a process run the steps of the first chunk's loader."""
    if vp_stage:
        return None, None, None
    settings = common_settings(runtime, recorder.task.documents_per_step, recorder.done.num_documents)
    plans = own_plan_maker(runtime, planner_of(runtime.run.decision))
    loader = RecordedSteps(recorder.source, plans, settings)
    loader.recorder = recorder
    return None, loader, None


def _recording(recorder: Recorder, runtime: Runtime, forward: ForwardStep) -> ForwardStep:
    """Return a forward step whose loss function also records the loss of each token."""

    def forward_step(data_iterator: Iterator[PackedUnit], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        unit = next(data_iterator)
        output, loss = forward(iter([unit]), model)
        step = runtime.step.batch
        assert step is not None, "no planned step is running"
        return output, _noting(partial(recorder.add, step, unit[1]), loss)

    return forward_step


def _noting(add: Callable[[torch.Tensor], None], loss: LossFunction) -> LossFunction:
    def noting(losses: torch.Tensor) -> Any:
        add(losses)
        return loss(losses)

    return noting
