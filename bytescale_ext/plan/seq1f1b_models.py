"""The models that Seq1F1B was measured with (Sun et al. 2024, section 4): GPT, its MLP 4 times the hidden size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bytescale_ext.plan.cost import LLAMA_7B, ModelShape


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model of the paper with the parallelism it ran with.

    Attributes:
        shape: of the model; the vocabulary is GPT-2's, padded.
        num_stages: pipeline stages; with ``tensor_parallel`` one pipeline fills the paper's GPUs.
        tensor_parallel: ranks that share a layer, with sequence parallelism.
        seq_lengths: that the paper trained with.
    """

    shape: ModelShape
    num_stages: int
    tensor_parallel: int
    seq_lengths: tuple[int, ...]


def _gpt(num_layers: int, hidden: int, num_heads: int) -> ModelShape:
    return ModelShape(num_layers, hidden, num_heads, num_heads, hidden // num_heads, 4 * hidden, False, 51200)


PAPER_MODELS: Final = {
    "gpt-2.7b": PaperModel(_gpt(32, 2560, 32), 8, 1, (16384, 24576, 32768)),
    "gpt-7b": PaperModel(_gpt(32, 4096, 32), 4, 8, (32768, 65536, 131072)),
    "gpt-13b": PaperModel(_gpt(40, 5120, 40), 4, 8, (32768, 49152, 65536)),
    "gpt-30b": PaperModel(_gpt(64, 6144, 64), 8, 8, (32768, 49152, 65536)),
}

SHAPES: Final = {"llama-7b": LLAMA_7B, **{name: model.shape for name, model in PAPER_MODELS.items()}}
"""Model shapes by name, for the command line."""
