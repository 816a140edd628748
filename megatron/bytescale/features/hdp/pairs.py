"""Training on pairs of answers: their data and their loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.preferences import PreferenceConfig
from bytescale_ext.data.corpus.sidecar import open_sidecar
from megatron.bytescale.arguments.data import DataArguments
from megatron.bytescale.arguments.options import current
from megatron.bytescale.core.datasets.answer_dataset import answer_config
from megatron.bytescale.core.datasets.pair_dataset import build_pairs, check_pairs
from megatron.bytescale.core.pipeline_parallel.pairs import PairLoss, report_pairs
from megatron.bytescale.features.hdp.build import dataset_provider
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training


def train_on_pairs(training: Training, runtime: Runtime) -> Training:
    """Load pairs instead of documents, and report their loss. Raises ValueError for splits without pairs."""
    data, config = current(DataArguments), runtime.run.get(PreferenceConfig)
    of_answers = answer_config(runtime.run.get(AnswerLossConfig).prefixes, data.settings())
    check_pairs(of_answers, data.wanted_samples())
    references = {prefix: open_sidecar(path) for prefix, path in config.references}
    loss = PairLoss(config.loss, config.beta)
    runtime.add_parts(pair_loss=loss)
    provider = dataset_provider(runtime, lambda sizes: build_pairs(of_answers.in_saved_order(), references, sizes))
    return replace(training, dataset_provider=provider).wrap_forward_step(partial(report_pairs, loss))
