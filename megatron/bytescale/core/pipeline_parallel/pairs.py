"""Two passes of a step of pairs: the first sums log-probabilities, the second has the gradient of the pairs' loss.

The first pass runs the step's micro-batches or slices forward only, in the model's evaluation mode. Its sums are added
over the ranks of the last stage. The derivative of the loss by each sum is then the weight of the answer's tokens
(``bytescale_ext/losses/preferences.py``), and the second pass is a step like any other. Pairs are counted by the row of
the first token of their preferred answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state

from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.losses.preferences import Answers, loss_row, weigh
from megatron.bytescale.core.packed_seq_params import PackedUnit

SumOfLosses = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[[torch.Tensor], SumOfLosses]
ForwardStep = Callable[..., tuple[torch.Tensor, LossFunction]]


@dataclass
class PairLoss:
    """The loss of pairs, and the sums of the running step.

    Attributes:
        name, beta: the loss.
        sums: sum and number of the weights of each document's labels times log-probability, float64 [documents, 2],
            while the first pass runs; else None.
        losses: loss of each pair in the second pass: float64 [pairs].
    """

    name: str
    beta: float
    sums: torch.Tensor | None = None
    losses: torch.Tensor | None = None

    def add(self, packed: PackedMicroBatch, of_tokens: LossFunction, losses: torch.Tensor) -> SumOfLosses:
        """Add the log-probabilities of a micro-batch or slice in the first pass; ``losses``: of each row, [rows]."""
        assert self.sums is not None, "the first pass runs"
        sequences, rows = sequence_of_rows(packed)
        weights = packed.loss_mask[:rows].double()
        logprobs = -losses.reshape(-1)[:rows].double() * weights
        places = torch.from_numpy(sequences).to(self.sums.device)
        self.sums.index_add_(0, places, torch.stack((logprobs, (weights != 0).double()), dim=1))
        return of_tokens(losses)

    def report(self, packed: PackedMicroBatch, of_tokens: LossFunction, losses: torch.Tensor) -> SumOfLosses:
        """Return the weighted losses of a micro-batch or slice, and report the loss of the pairs that it counts.

        ``losses``: of each row, [rows].
        """
        total, count, _ = of_tokens(losses)
        assert self.losses is not None, "the second pass runs"
        mine = self.losses[counted_pairs(packed)].sum().to(total)
        return total, count, {"lm loss": torch.stack([mine, count.to(total.dtype)])}

    def weigh(self, sums: torch.Tensor, references: np.ndarray) -> torch.Tensor:
        """Return the weight of each document in the second pass: [documents].

        Args:
            sums: sums of all ranks: [documents, 2].
            references: log-probability of each document under the reference model: [documents].
        """
        answers = sums.cpu().view(-1, 2, 2)
        reference = torch.from_numpy(references).view(-1, 2)
        row = loss_row(self.name)
        losses, weights = weigh(row, self.beta, Answers(answers[..., 0], answers[..., 1], reference))
        self.losses = losses.to(sums.device)
        return weights.reshape(-1)


def sequence_of_rows(packed: PackedMicroBatch) -> tuple[np.ndarray, int]:
    """Return the document of each row that is not padding, [rows], and their number."""
    shards = packed.micro_batch.shards
    sequences = np.repeat([shard.seq for shard in shards], [shard.num_tokens for shard in shards]).astype(np.int64)
    return sequences, len(sequences)


def counted_pairs(packed: PackedMicroBatch) -> list[int]:
    """Return the pairs whose preferred answer begins in a micro-batch or slice."""
    shards = packed.micro_batch.shards
    return [shard.seq // 2 for shard in shards if shard.seq % 2 == 0 and shard.ranges and shard.ranges[0][0] == 0]


def with_pair_weights(packed: PackedMicroBatch, weights: torch.Tensor) -> PackedMicroBatch:
    """Return a micro-batch or slice for the second pass; ``weights``: weight of each document, [documents]."""
    sequences, rows = sequence_of_rows(packed)
    mask, counts = packed.loss_mask.clone(), torch.zeros_like(packed.loss_mask)
    mask[:rows] *= weights[torch.from_numpy(sequences)].to(mask.dtype)
    row = 0
    for shard in packed.micro_batch.shards:
        if shard.seq % 2 == 0 and shard.ranges and shard.ranges[0][0] == 0:
            counts[row] = 1.0
        row += shard.num_tokens
    return replace(packed, loss_mask=mask, label_counts=counts)


def weigh_pairs(
    loss: PairLoss,
    step: StepBatch,
    chunks: list[torch.nn.Module],
    run: Callable[[], object],
) -> tuple[PackedMicroBatch, ...]:
    """Run the first pass of a step, and return its micro-batches or slices with the weights of the second.

    Collective on the ranks of the last stage: one all-reduce of two numbers for each document.

    Args:
        loss: loss of pairs.
        step: the step.
        chunks: model of this process.
        run: runs all units forward.
    """
    assert step.references is not None, "the loader reads pairs"
    device = next(chunks[0].parameters()).device
    loss.sums = torch.zeros(len(step.references), 2, dtype=torch.float64, device=device)
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        run()
    for chunk, was_training in zip(chunks, training, strict=True):
        chunk.train(was_training)
    sums, loss.sums = loss.sums, None
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return step.micro_batches
    torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    weights = loss.weigh(sums, step.references)
    return tuple(with_pair_weights(packed, weights) for packed in step.micro_batches)


def report_pairs(loss: PairLoss, forward: ForwardStep) -> ForwardStep:
    """Return a forward step that sums log-probabilities in the first pass, and reports pairs in the second.

    Its output has the losses of all rows: [1, rows].
    """

    def forward_step(data_iterator: Iterator[PackedUnit], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        unit = next(data_iterator)
        output, of_tokens = forward(iter([unit]), model)
        note = loss.report if loss.sums is None else loss.add
        return output, partial(note, unit[1].to(output.device), of_tokens)

    return forward_step
