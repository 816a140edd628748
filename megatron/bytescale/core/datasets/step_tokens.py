"""Number of samples for a run whose steps are measured in tokens (``--hdp-global-tokens``)."""

from __future__ import annotations

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import Split

from bytescale_ext.data.samples.document_samples import DocumentSamples, open_samples
from bytescale_ext.data.samples.lengths import SampleTable
from megatron.bytescale.core.datasets.answer_dataset import AnswerConfig
from megatron.bytescale.core.datasets.document_dataset import cache_folder, document_bounds, wanted_parts


def samples_that_hold(num_tokens: int, config: BlendedMegatronDatasetConfig) -> int:
    """Return a number of samples that contains at least ``num_tokens`` tokens, at any position of the training split.

    The data set with the shortest samples determines the number. It is doubled, with two more epochs, because the
    partial epochs at both ends may contain only short samples. Reads the index of each file.
    """
    ((prefixes, share),) = (
        (prefixes, share) for split, prefixes, share in wanted_parts(config) if split is Split.train
    )
    most = 0
    for prefix in prefixes:
        samples: SampleTable | DocumentSamples
        if isinstance(config, AnswerConfig):
            samples = config.split_table(prefix, share)
        else:
            whole = open_samples(prefix, config.sequence_length, cache_folder(config))
            samples = whole.part(*document_bounds(share, whole.index.num_documents))
        most = max(most, 2 * (num_tokens // samples.num_tokens + 2) * len(samples))
    return most
