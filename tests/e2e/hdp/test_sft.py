"""Fine-tuning on answers: every layout has the loss and gradients of one process with Megatron's own SFTDataset."""

from __future__ import annotations

import json
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.data.samples.lengths import read_idx_lengths
from tests.data.chats import Messages, random_chats, write_lines, write_tokenizer
from tests.e2e.once import once
from tests.e2e.oracle import gradients, relative_error, train_with_named_weights
from tests.e2e.pipelines import train_one_by_one, whole_gradients
from tests.e2e.training import HDP, MODEL, TRAIN, SavedRun, train_once, train_ranks
from tests.harness import run_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
# Words of question and answer: rings of 4, packs, an answer beyond --seq-length, an answer that is cut off there.
SIZES = [(5, 7), (150, 40), (3, 20, 4, 9), (8, 2), (60, 50), (400, 5), (180, 200), (1, 1, 1, 1), (80, 85), (9, 1)]
CHATS = random_chats([SIZES[i % len(SIZES)] for i in range(24)])
LAYOUTS: dict[str, tuple[int, list[object]]] = {
    "rings": (4, ["--use-distributed-optimizer", "--overlap-grad-reduce"]),
    "pipeline in slices, loss in chunks, memo": (
        2,
        "--pipeline-model-parallel-size 2 --hdp-tokens-per-rank 256 --seq1f1b-slices 2 --chunked-cross-entropy 48 "
        "--activation-policy memo --host-memory-gb 0.1".split(),
    ),
}


@pytest.fixture(scope="module")
def data() -> Path:
    """Return a folder with conversations, their data set and the tokenizer."""
    return once(write, "conversations")


def write(folder: Path) -> Path:
    run_ranks(write_data_set, 1, str(folder), init_group=False)
    lengths = read_idx_lengths(folder / "chats")
    assert len(lengths) == 24
    assert {-(-int(length) // 64) for length in lengths} >= {1, 2, 3, 4, 9}, lengths
    return folder


def write_data_set(rank: int, world: int, folder: str) -> None:
    """Write the tokenizer, the data set, and the tokens that Megatron's tokenizer makes of each conversation."""
    from megatron.bytescale import cli
    from megatron.bytescale.core.datasets.corpus import build_megatron_tokenizer

    write_tokenizer(Path(folder, "tokenizer"))
    write_lines(Path(folder, "chats.jsonl"), CHATS)
    settings = {"tokenizer_type": "SFTTokenizer", "tokenizer_model": f"{folder}/tokenizer",
                "sft_tokenizer_prompt_format": "nemotron-nano-v2"}  # fmt: skip
    words = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]
    where = ["--from", f"{folder}/chats.jsonl", "--output", f"{folder}/chats"]
    assert cli.main(["corpus", "--sft", *where, *words]) == 0
    lines = [json.loads(line) for line in Path(folder, "chats.jsonl").read_text().splitlines()]
    weighted = [{**line, "advantage": (-1) ** number * (0.2 + number / 16)} for number, line in enumerate(lines)]
    Path(folder, "weighted.jsonl").write_text("".join(json.dumps(line) + "\n" for line in weighted))
    where = ["--from", f"{folder}/weighted.jsonl", "--output", f"{folder}/weighted", "--weights", "advantage"]
    assert cli.main(["corpus", "--sft", *where, *words]) == 0
    tokenizer: Any = build_megatron_tokenizer(settings)
    encoded = [tokenizer.tokenize_conversation(one, return_target=True, add_generation_prompt=False) for one in CHATS]
    Path(folder, "encoded.pickle").write_bytes(pickle.dumps((encoded, tokenizer.pad, tokenizer.eod)))


class Recorded:
    """Tokens of the conversations by Megatron's tokenizer, whose slow import is avoided."""

    def __init__(self, folder: str) -> None:
        self.encoded, self.pad, self.eod = pickle.loads(Path(folder, "encoded.pickle").read_bytes())
        self.unique_identifiers, self.vocab_size = {"of": folder}, 383

    def tokenize_conversation(self, conversation: Messages, return_target: bool, add_generation_prompt: bool) -> Any:
        return self.encoded[CHATS.index(conversation)]


def common(data: Path, *flags: object, name: str = "chats") -> list[object]:
    vocabulary = ["--vocab-size", 383]  # 384 rows in the embedding, from the tokenizer's 330 tokens and padding
    return [*MODEL, *TRAIN, "--data-path", data / name, *vocabulary, *flags]


def stock_data_set(folder: str) -> None:
    """Entry (by ``partial``) of one process of stock Megatron with one conversation per micro-batch."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.training.datasets.sft_dataset import SFTDataset

    from megatron.bytescale.core.datasets import document_dataset
    from megatron.bytescale.core.datasets.answer_dataset import answer_config, build_conversations
    from tests.e2e import oracle

    split = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}

    class OneConversation(torch.utils.data.Dataset):  # type: ignore[type-arg]
        """One of our samples in the form of Megatron's data set: padded to ``--seq-length``."""

        def __init__(self, source: Any, batch_size: int) -> None:
            config = GPTDatasetConfig(
                random_seed=1, sequence_length=256, blend=(["unread"], None), split="1", tokenizer=Recorded(folder),
                create_attention_mask=False, context_parallel_size=1, **split,
            )  # fmt: skip
            self.source = source
            self.stock = SFTDataset(CHATS, None, list(range(24)), 24, Split.train, config)  # type: ignore[arg-type]

        def __len__(self) -> int:
            return len(self.source)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            sample = self.stock[self.source.sample(index).document]
            return {name: sample[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}

    def build(config: Any, sizes: Any, is_built: Any) -> Any:
        values = {name: getattr(config, name) for name in ("random_seed", "sequence_length", "blend", "split")}
        return build_conversations(answer_config(config.blend[0], values), sizes)

    oracle.OneDocument = OneConversation  # type: ignore[misc, assignment]
    document_dataset.build_document_datasets = build
    train_one_by_one()


@pytest.fixture(scope="module")
def stock(data: Path) -> SavedRun:
    one_by_one: list[object] = ["--micro-batch-size", 1, "--calculate-per-token-loss"]
    return train_once(1, *common(data, *one_by_one), entry=partial(stock_data_set, str(data)))


@pytest.mark.parametrize("name", sampled(LAYOUTS, ["pipeline in slices, loss in chunks, memo"]))
def test_loss_and_gradients_are_those_of_megatrons_own_data_set(name: str, data: Path, stock: SavedRun) -> None:
    num_ranks, flags = LAYOUTS[name]
    run = train_once(num_ranks, *common(data, *HDP, "--sft", *flags), entry=train_with_named_weights)
    assert len(stock.losses) == 3
    assert run.losses == pytest.approx(stock.losses, rel=TOLERANCE)
    wanted = gradients(stock.save)
    (found,) = whole_gradients(run.save, 2 if "pipeline" in name else 1, 1)
    assert {key for key in found if "_extra" not in key} == {key for key in wanted if "_extra" not in key}
    for key, value in found.items():
        if "_extra" not in key:
            assert relative_error(value, wanted[key]) < TOLERANCE, key


WEIGHTED: dict[str, tuple[int, list[object]]] = {
    "rings": LAYOUTS["rings"],
    "pipeline in slices, tensor parallelism": (
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --hdp-tokens-per-rank 256 "
        "--seq1f1b-slices 2 --make-vocab-size-divisible-by 64".split(),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("normalization", ["tokens", "documents"])
def test_weights_and_means_over_documents_equal_one_process(normalization: str, data: Path) -> None:
    """Weights are positive and negative; each layout has the loss and gradients of one process."""
    flags = [*HDP, "--sft", "--loss-normalization", normalization]
    alone = train_once(
        1, *common(data, *flags, "--hdp-tokens-per-rank", 1024, name="weighted"), entry=train_with_named_weights
    )
    plain = train_once(1, *common(data, *flags, "--hdp-tokens-per-rank", 1024), entry=train_with_named_weights)
    assert alone.losses != pytest.approx(plain.losses, rel=0.01)
    wanted = gradients(alone.save)
    for num_ranks, layout in WEIGHTED.values():
        run = train_once(num_ranks, *common(data, *flags, *layout, name="weighted"), entry=train_with_named_weights)
        assert run.losses == pytest.approx(alone.losses, rel=TOLERANCE, abs=1e-6)
        if "--tensor-model-parallel-size" not in layout:
            (found,) = whole_gradients(run.save, 1, 1)
            for key, value in found.items():
                assert "_extra" in key or relative_error(value, wanted[key]) < TOLERANCE, key


@pytest.mark.full
def test_a_resumed_run_goes_on_with_the_next_conversation_on_other_ranks(
    data: Path, stock: SavedRun, tmp_path: Path
) -> None:
    saving = ["--hdp-tokens-per-rank", 128, "--ckpt-format", "torch_dist", "--save", tmp_path, "--sft"]
    first, last = train_ranks(2, *common(data, *HDP, *saving, "--exit-interval", 2), entry=train_with_named_weights)
    assert last.losses == pytest.approx(stock.losses[:2], rel=TOLERANCE)
    told = r"train: (\d+) of 24 conversations have an answer in their first 256 tokens; (\d+) are cut there"
    found = re.search(told, first.text)
    assert found is not None
    cut = read_idx_lengths(data / "chats") > 256
    assert 24 - int(found[1]) > 0 < int(found[2]) == cut.sum()
    (resumed,) = train_ranks(1, *common(data, *HDP, *saving, "--hdp-tokens-per-rank", 256, "--load", tmp_path))
    assert resumed.losses == pytest.approx(stock.losses[2:], rel=TOLERANCE)
    assert "WARNING: the checkpoint counts" not in resumed.text
