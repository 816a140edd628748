"""Run real training in the ranks of a test, and read back what Megatron printed and saved.

``entry`` arguments are functions that take the place of ``pretrain_gpt_hdp.main`` in each rank. They are pickled by
name: functions of a module, or ``functools.partial`` of one.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.harness import preload, run_ranks

VOCAB = 61
# Rings of 4, 3, 2 and 1 ranks at C = 64, packs, and documents of one and two tokens.
LENGTHS = (256, 3, 190, 130, 1, 17, 64, 40, 2, 100, 33, 65, 129, 8, 20, 50, 9, 193, 300, 5, 77, 12, 31, 600)
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --seq-length 256 --max-position-embeddings 256"
).split()
TRAIN = (
    "--global-batch-size 8 --train-iters 5 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-decay-iters 10 "
    "--clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 0 --eval-interval 1000 --save-interval 1000 "
    "--num-workers 0 --split 100,0,0 --no-one-logger --ckpt-format torch"
).split()
HDP = "--hybrid-data-parallel --hdp-tokens-per-rank 64".split()


@dataclass(frozen=True)
class Outcome:
    """What one rank's run left: its exit code, its printed text and the losses in it."""

    code: int | None
    text: str

    @property
    def losses(self) -> list[float]:
        """lm loss of each logged iteration."""
        return [float(value) for value in re.findall(r"iteration +\d+/.*lm loss: ([-\d.E+naif]+)", self.text)]

    @property
    def validation_losses(self) -> list[float]:
        """lm loss of each evaluation."""
        return [float(value) for value in re.findall(r"lm loss value: ([-\d.E+naif]+)", self.text)]

    def records(self, training: bool = True) -> list[dict[str, Any]]:
        """What ``record_steps`` noted of each step of this rank, of training or of evaluation."""
        records = [json.loads(line) for line in re.findall(r"^RECORD (.*)$", self.text, re.MULTILINE)]
        return [record for record in records if record["training"] == training]


def write_documents(prefix: Path, lengths: Sequence[int] = LENGTHS, seed: int = 0, copies: int = 4) -> Path:
    """A data set of random documents in Megatron's format: ``copies`` times the lengths, new tokens each time."""
    from bytescale_ext.data.lengths import read_idx_lengths

    preload("tests.e2e.preload")
    run_ranks(_write, 1, str(prefix), tuple(lengths) * copies, seed, init_group=False)
    assert read_idx_lengths(prefix).tolist() == list(lengths) * copies
    return prefix


def _write(rank: int, world: int, prefix: str, lengths: Sequence[int], seed: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(generator.integers(0, VOCAB, length), [length])
    builder.finalize(f"{prefix}.idx")


def train(num_ranks: int, *flags: object, entry: Callable[[], None] | None = None, timeout: float = 240) -> Outcome:
    """Train with ``pretrain_gpt_hdp.py`` on ``num_ranks`` CPU ranks; the last rank's text with all exit codes checked.

    ``entry`` takes the place of ``pretrain_gpt_hdp.main`` (the one-process oracle).
    """
    return train_ranks(num_ranks, *flags, entry=entry, timeout=timeout)[-1]


def train_ranks(
    num_ranks: int, *flags: object, entry: Callable[[], None] | None = None, timeout: float = 240
) -> list[Outcome]:
    """As ``train``; what every rank left."""
    preload("tests.e2e.preload")
    argv = ["pretrain_gpt_hdp.py", *map(str, flags)]
    outcomes: list[Outcome] = run_ranks(_train, num_ranks, argv, entry, timeout=timeout)
    assert len({outcome.code for outcome in outcomes}) == 1, outcomes
    return outcomes


def train_apart(
    *runs: Sequence[object], entry: Callable[[], None] | None = None, timeout: float = 240
) -> list[Outcome]:
    """Each run's flags in a process of its own that is alone in the world, all at once."""
    preload("tests.e2e.preload")
    argvs = [["pretrain_gpt_hdp.py", *map(str, flags)] for flags in runs]
    outcomes: list[Outcome] = run_ranks(_train_apart, len(runs), argvs, entry, timeout=timeout, init_group=False)
    return outcomes


def _train_apart(rank: int, world: int, argvs: list[list[str]], entry: Callable[[], None] | None) -> Outcome:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return _train(0, 1, argvs[rank], entry)


def train_to_failure(
    num_ranks: int, *flags: object, entry: Callable[[], None], folder: Path, timeout: float = 60
) -> list[str | None]:
    """As ``train`` for a run that fails: the traceback of each rank, or None of one that was killed.

    A rank that fails ends its process at once, and nothing else ends the others. Raises TimeoutError if one hangs.
    """
    preload("tests.e2e.preload")
    argv = ["pretrain_gpt_hdp.py", *map(str, flags)]
    ranks = range(num_ranks)
    outcomes = run_ranks(_train_alone, num_ranks, argv, entry, str(folder), timeout=timeout, may_die=ranks)
    assert outcomes == [None] * num_ranks, f"ranks that did not fail: {outcomes}"
    files = [folder / f"rank{rank}.txt" for rank in ranks]
    return [file.read_text() if file.exists() else None for file in files]


def _train_alone(rank: int, world: int, argv: list[str], entry: Callable[[], None], folder: str) -> Outcome:
    try:
        return _train(rank, world, argv, entry)
    except BaseException:
        Path(folder, f"rank{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # a rank of the harness would stay connected to its peers, as a process that has failed does not


def _train(rank: int, world: int, argv: list[str], entry: Callable[[], None] | None) -> Outcome:
    import pretrain_gpt_hdp

    sys.argv = argv
    text = io.StringIO()
    code: int | None = None
    logging.basicConfig(stream=text, level=logging.INFO, force=True)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            (entry or pretrain_gpt_hdp.main)()
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        except BaseException:
            sys.__stdout__.write(text.getvalue()[-3000:])
            raise
    return Outcome(code, text.getvalue())


def train_with(action: Callable[[Any, torch.nn.Module], None]) -> None:
    """An entry (by ``partial``): call ``action(runtime, model)`` in each step of a rank before its first forward."""
    import pretrain_gpt_hdp
    from megatron.bytescale.training import hdp

    original = hdp.forward_step

    def forward_step(runtime: Any) -> Callable[..., Any]:
        forward = original(runtime)
        begun: Any = None

        def forward_with_action(data_iterator: Any, model: torch.nn.Module) -> Any:
            nonlocal begun
            if runtime.step is not begun:
                begun = runtime.step
                action(runtime, model)
            return forward(data_iterator, model)

        return forward_with_action

    hdp.forward_step = forward_step
    pretrain_gpt_hdp.main()


def record_steps() -> None:
    """An entry: note each step of this rank for ``Outcome.records``."""
    train_with(print_step)


def print_step(runtime: Any, model: torch.nn.Module) -> None:
    """Print what ``Outcome.records`` reads: the step's samples and this rank's part of it."""
    step = runtime.step
    documents = {
        shard.seq: name
        for packed in step.micro_batches
        for shard, name in zip(packed.micro_batch.shards, packed.documents, strict=True)
    }
    record = {
        "training": model.training,
        "iteration": step.step_index + 1,
        "sample_ids": step.sample_ids,
        "lengths": step.lengths,
        "documents": documents,
        "num_micro_batches": len(step.micro_batches),
        "num_rows": sum(packed.num_rows for packed in step.micro_batches),
    }
    print(f"RECORD {json.dumps(record)}")


def documents_in_order(outcomes: Sequence[Outcome], training: bool = True) -> list[list[str]]:
    """The documents of each step in the order of its samples, put together from what each rank was given."""
    steps = []
    for of_ranks in zip(*(outcome.records(training) for outcome in outcomes), strict=True):
        assert len({tuple(record["sample_ids"]) for record in of_ranks}) == 1, of_ranks
        merged: dict[str, str] = {}
        for record in of_ranks:
            assert all(merged.get(seq, name) == name for seq, name in record["documents"].items()), of_ranks
            merged.update(record["documents"])
        steps.append([merged[str(seq)] for seq in range(len(of_ranks[0]["sample_ids"]))])
    return steps


def step_losses(log_dir: Path) -> list[float]:
    """lm loss of each step, unrounded, from ``metrics.jsonl`` (with ``--log-interval 1``).

    Megatron's own log line after the second step of a run shows the mean of the first two.
    """
    rows = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["lm loss"] for row in rows]


def gradients(save: Path, iteration: int = 1, tp_rank: int = 0) -> dict[str, torch.Tensor]:
    """The reduced gradients that ``--save-wgrads-interval 1`` left, by parameter name."""
    folder = save / "wgrads" / f"iter_{iteration:07d}"
    files = sorted(folder.glob(f"mp_rank_{tp_rank:02d}*"))
    assert len(files) == 1, list(folder.iterdir())
    return torch.load(files[0], weights_only=False)["model_chunk0"]


def shard_of(whole: torch.Tensor, name: str, shard: torch.Tensor, tp_rank: int, tp_size: int) -> torch.Tensor:
    """The part of a whole tensor that tensor-parallel rank ``tp_rank`` holds."""
    if whole.shape == shard.shape:
        return whole
    dim = next(i for i, (a, b) in enumerate(zip(whole.shape, shard.shape, strict=True)) if a != b)
    if "linear_fc1" in name:  # gate and up, each cut by itself
        halves = [half.chunk(tp_size, dim)[tp_rank] for half in whole.chunk(2, dim)]
        return torch.cat(halves, dim)
    return whole.chunk(tp_size, dim)[tp_rank]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """2-norm of the difference over the 2-norm of the expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def draw_weights_by_name(scale: float = 0.1) -> None:
    """Start every layout from the same weights: Megatron draws others on each pipeline stage and each expert rank."""
    from megatron.training.models.gpt import GPTModelBuilder

    build_model = GPTModelBuilder.build_model

    def build_and_draw(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = build_model(self, *args, **kwargs)
        groups = model.pg_collection
        layers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
        first_expert = (model.config.num_moe_experts or 0) // groups.ep.size() * groups.ep.rank()
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the last stage's copy
            group = groups.expt_tp if "local_experts" in name else groups.tp
            whole_name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{layers[int(found[1])]}", name)
            whole_name = re.sub(r"experts\.(\d+)", lambda found: f"experts.{first_expert + int(found[1])}", whole_name)
            shape = list(parameter.shape)
            if getattr(parameter, "partition_dim", -1) >= 0:
                shape[parameter.partition_dim] *= group.size()
            generator = torch.Generator().manual_seed(zlib.crc32(whole_name.encode()))
            whole = scale * torch.randn(shape, generator=generator)
            parameter.data.copy_(shard_of(whole, name, parameter, group.rank(), group.size()))
        return model

    GPTModelBuilder.build_model = build_and_draw


def train_documents_one_by_one() -> None:
    """The oracle: stock Megatron in one process, one whole document per micro-batch, its own dense attention."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron.bytescale import install
    from megatron.bytescale.training import arguments, stock

    args, _ = arguments.parse(sys.argv, on_cpu=True)
    install(None)
    model = gpt_config_from_args(args)
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        _whole_documents,
        ModelType.encoder_or_decoder,
        stock.forward_step,
    )


def _whole_documents(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
    from megatron.training import get_args, get_tokenizer

    from megatron.bytescale.core.datasets.document_dataset import build_document_datasets

    args = get_args()
    config = BlendedMegatronDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        tokenizer=get_tokenizer(),
    )
    sources = build_document_datasets(config, num_samples, lambda: True)
    return tuple(source and OneDocument(source) for source in sources)  # type: ignore[return-value]


class OneDocument(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One sample of a source, as Megatron's GPTDataset gives it."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
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
