"""Reference run: one process of stock Megatron with one document per micro-batch.

Also functions for comparisons: equal weights in every layout, and the gradients that Megatron saves.
"""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from tests.doubles.engine import expert_name


def gradients(save: Path, iteration: int = 1, tp_rank: int = 0) -> dict[str, torch.Tensor]:
    """Return the reduced gradients saved by ``--save-wgrads-interval 1``, by parameter name."""
    folder = save / "wgrads" / f"iter_{iteration:07d}"
    files = sorted(folder.glob(f"mp_rank_{tp_rank:02d}*"))
    assert len(files) == 1, list(folder.iterdir())
    return torch.load(files[0], weights_only=False, map_location="cpu")["model_chunk0"]


def shard_of(
    whole: torch.Tensor, name: str, shard: torch.Tensor, tp_rank: int, tp_size: int, is_gated: bool = True
) -> torch.Tensor:
    """Return the part of a whole tensor on tensor-parallel rank ``tp_rank``; ``is_gated``: MLPs have a gate."""
    if whole.shape == shard.shape:
        return whole
    dim = next(i for i, (a, b) in enumerate(zip(whole.shape, shard.shape, strict=True)) if a != b)
    if "linear_fc1" in name and is_gated:  # gate and up are split separately
        halves = [half.chunk(tp_size, dim)[tp_rank] for half in whole.chunk(2, dim)]
        return torch.cat(halves, dim)
    return whole.chunk(tp_size, dim)[tp_rank]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the 2-norm of the difference over the 2-norm of the expected tensor."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def train_with_named_weights() -> None:
    """Entry that starts from weights that do not depend on the layout."""
    import pretrain_gpt_hdp

    draw_weights_by_name()
    pretrain_gpt_hdp.main()


def draw_weights_by_name(scale: float = 0.1, everything: bool = False) -> None:
    """Start every layout from the same weights. In Megatron they depend on the pipeline stage and the expert rank.

    With ``everything``, biases and the weights of norms, which Megatron starts from 0 and 1, are drawn, too.
    """
    from megatron.training.models.gpt import GPTModelBuilder

    build_model = GPTModelBuilder.build_model

    def build_and_draw(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = build_model(self, *args, **kwargs)
        groups = model.pg_collection
        layers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
        first_expert = (model.config.num_moe_experts or 0) // groups.ep.size() * groups.ep.rank()
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and not everything and not name.endswith("softmax_offset"):
                continue
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # copy on the last stage
            name = expert_name(name)
            group = groups.expt_tp if "local_experts" in name else groups.tp
            whole_name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(layers[int(found[0])]), name)
            whole_name = re.sub(r"experts\.(\d+)", lambda found: f"experts.{first_expert + int(found[1])}", whole_name)
            shape = list(parameter.shape)
            if getattr(parameter, "tensor_model_parallel", False):
                shape[parameter.partition_dim] *= group.size()
            generator = torch.Generator().manual_seed(zlib.crc32(whole_name.encode()))
            whole = scale * torch.randn(shape, generator=generator) + name.endswith("norm.weight")
            is_gated = model.config.gated_linear_unit
            parameter.data.copy_(shard_of(whole, name, parameter, group.rank(), group.size(), is_gated))
        return model

    GPTModelBuilder.build_model = build_and_draw


def train_documents_one_by_one() -> None:
    """Run the oracle: stock Megatron in one process, with one document per micro-batch and its own dense attention.

    Stock Megatron sums auxiliary losses over tokens and divides them by labels. They are means over tokens here
    (``MeanOverTokens``).
    """
    from megatron.core.enums import ModelType
    from megatron.core.transformer.moe import router
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron.bytescale import cpu, install
    from megatron.bytescale.arguments.parse import parse
    from megatron.bytescale.training import stock

    args = parse(sys.argv, on_cpu=cpu.installed())
    install(None)
    router.MoEAuxLossAutoScaler = MeanOverTokens  # type: ignore[misc, assignment]
    model = gpt_config_from_args(args)
    model.rope_scaling_factor = args.rope_scaling_factor  # Megatron's function leaves these out
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        _whole_documents,
        ModelType.encoder_or_decoder,
        stock.forward_step,
    )


def _whole_documents(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    from megatron.training import get_args, get_tokenizer

    from megatron.bytescale.core.datasets.document_dataset import DocumentConfig, build_document_datasets

    args = get_args()
    config = DocumentConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        tokenizer=get_tokenizer(),
    )
    sources = build_document_datasets(config, num_samples, lambda: True)
    return tuple(source and OneDocument(source, args.global_batch_size) for source in sources)  # type: ignore[return-value]


class MeanOverTokens:
    """Megatron's ``MoEAuxLossAutoScaler`` for losses of the running step.

    Attributes:
        labels_per_token: labels of the step over its tokens, as the data set counts them.
    """

    labels_per_token = 1.0

    @classmethod
    def apply(cls, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        return MoEAuxLossAutoScaler.apply(output, loss * cls.labels_per_token)  # type: ignore[no-any-return]

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.set_loss_scale(scale)


class OneDocument(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of a source in the form of Megatron's GPTDataset."""

    def __init__(self, source: Any, batch_size: int) -> None:
        self.source, self.batch_size = source, batch_size

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.note_labels(index // self.batch_size * self.batch_size)
        length = self.source.length(index)
        read = torch.from_numpy(self.source.read(index, 0, length + 1))
        labels = torch.zeros(length, dtype=torch.int64)
        labels[: len(read) - 1] = read[1:]
        loss_mask = torch.ones(length)
        loss_mask[len(read) - 1 :] = 0
        return {
            "tokens": read[:length],
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": torch.arange(length),
        }

    def note_labels(self, first: int) -> None:
        """Record the number of labels of the step that begins with a sample. A document's last token has no label."""
        step = range(first, min(first + self.batch_size, len(self.source)))
        tokens = [self.source.length(index) for index in step]
        labels = [len(self.source.read(index, 0, size + 1)) - 1 for index, size in zip(step, tokens, strict=True)]
        MeanOverTokens.labels_per_token = sum(labels) / sum(tokens)
