"""Training on groups of documents: pairs of answers, recorded rollouts, and means over groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.training.utils import print_rank_0

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.preferences import PreferenceConfig
from bytescale_ext.data.corpus.sidecar import advantages_of, old_logprobs_of, open_sidecar
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.losses.policy import PolicyLoss, policy_losses
from megatron.bytescale.arguments.data import DataArguments
from megatron.bytescale.arguments.options import current
from megatron.bytescale.core.datasets.document_dataset import DocumentDataset
from megatron.bytescale.core.datasets.group_dataset import (
    Groups,
    Pairs,
    Rollouts,
    build_groups,
    check_groups,
    group_config,
)
from megatron.bytescale.core.packed_seq_params import PackedUnit
from megatron.bytescale.core.pipeline_parallel.pairs import PairLoss, report_pairs
from megatron.bytescale.features.hdp.build import dataset_provider
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.stock import ForwardStep, LossFunction

Report = dict[str, torch.Tensor]


def train_on_groups(
    training: Training,
    runtime: Runtime,
    source_of: Callable[[DocumentDataset | BlendedDataset], Groups] = Groups,
) -> Training:
    """Load groups instead of documents; ``source_of``: function from data sets to their samples.

    Raises:
        ValueError: a split has no groups, or a group is larger than a step.
    """
    data = current(DataArguments)
    config = group_config(runtime.run.get(AnswerLossConfig).prefixes, data.settings())
    for line in check_groups(config, data.wanted_samples(), runtime.hdp.global_tokens):
        print_rank_0(line)

    def sources(sizes: object) -> tuple[Groups | None, ...]:
        built = build_groups(config.in_saved_order(), sizes)  # type: ignore[arg-type]
        return tuple(None if dataset is None else source_of(dataset) for dataset in built)

    return replace(training, dataset_provider=dataset_provider(runtime, sources))


def train_on_pairs(training: Training, runtime: Runtime) -> Training:
    """Load pairs, run two passes in each step, and report the loss of the pairs. Raises as ``train_on_groups``."""
    config = runtime.run.get(PreferenceConfig)
    references = {prefix: open_sidecar(path) for prefix, path in config.references}
    loss = PairLoss(config.loss, config.beta)
    runtime.add_parts(pair_loss=loss)
    on_pairs = train_on_groups(training, runtime, lambda dataset: Pairs(dataset, references))
    return on_pairs.wrap_forward_step(partial(report_pairs, loss))


def train_on_rollouts(training: Training, runtime: Runtime) -> Training:
    """Load rollouts, and train on the clipped ratio of policies. Raises as ``train_on_groups``."""
    config, prefixes = runtime.run.get(PreferenceConfig), runtime.run.get(AnswerLossConfig).prefixes
    numbers = (
        {prefix: open_sidecar(old_logprobs_of(prefix)) for prefix in prefixes},
        {prefix: open_sidecar(advantages_of(prefix)) for prefix in prefixes},
        {prefix: open_sidecar(path) for prefix, path in config.references},
    )
    loss = PolicyLoss(config.beta, *config.clip)
    on_rollouts = train_on_groups(training, runtime, lambda dataset: Rollouts(dataset, numbers))
    return on_rollouts.wrap_forward_step(partial(use_policy_loss, loss))


def use_policy_loss(loss: PolicyLoss, forward: ForwardStep) -> ForwardStep:
    """Return a forward step whose loss function takes the losses of a policy instead of the tokens' own."""

    def forward_step(data_iterator: Iterator[PackedUnit], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        unit = next(data_iterator)
        output, of_tokens = forward(iter([unit]), model)
        return output, partial(report_policy, loss, unit[1].to(output.device), of_tokens)

    return forward_step


def report_policy(
    loss: PolicyLoss, packed: PackedMicroBatch, of_tokens: LossFunction, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Return the policy's losses of a micro-batch or slice, their number and the report.

    The report has the sums of the loss, of the divergence from the reference model, and of tokens with a cut ratio, all
    weighted by the loss mask. ``losses``: minus the log-probability of each row's label, in any shape.
    """
    rows = losses.reshape(-1)
    if packed.rollouts is None:  # padding of a rank without work
        numbers = rows.new_zeros(len(rows), 3)
    else:
        numbers = packed.rollouts
    has_loss = packed.loss_mask != 0  # exp() may be infinite for prompts, which have no old log-probability
    found = policy_losses(loss, torch.where(has_loss, -rows, 0.0), torch.where(has_loss[:, None], numbers, 0.0))
    total, count, report = of_tokens(found.losses)
    for name, figures in (("kl to reference", found.divergences), ("clipped ratios", found.clipped)):
        share = torch.sum(figures.float() * packed.loss_mask)
        report[name] = torch.stack([share, count.to(share.dtype)])
    return total, count, report
