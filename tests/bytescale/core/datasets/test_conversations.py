"""``bytescale corpus --sft``: tokens and masks equal Megatron's, with a tokenizer trained in the test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.data.corpus.sidecar import (
    ADVANTAGES,
    LOGPROBS,
    advantages_of,
    check_sidecar,
    check_weights,
    group_bounds,
    old_logprobs_of,
    open_sidecar,
    weights_of,
)
from bytescale_ext.data.samples.sources import file_entries
from megatron.bytescale.cli import corpus as cli
from megatron.bytescale.core.datasets import conversations
from megatron.bytescale.core.datasets.conversations import Fields
from tests.data.chats import chat, message, random_chats, write_lines, write_tokenizer

CHATS = random_chats([(5, 7), (3, 20, 4, 9), (8, 2), (1, 1, 1, 1, 1, 1), (30, 40), (2,)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with conversations and two tokenizers."""
    root = tmp_path_factory.mktemp("sft")
    write_lines(root / "a.jsonl", CHATS)
    write_tokenizer(root / "tokenizer")
    write_tokenizer(root / "plain", chat_template=None)
    return root


def settings(folder: Path, kind: str, model: str = "tokenizer", **more: object) -> dict[str, Any]:
    return {"tokenizer_type": kind, "tokenizer_model": str(folder / model), **more}


def written(folder: Path, out: Path, chosen: dict[str, Any], name: str = "a.jsonl", **options: Any) -> Any:
    tokenizer = conversations.chat_tokenizer(chosen)
    return conversations.write_conversations(str(out), file_entries(folder / name), tokenizer, **options)


def documents(out: Path) -> list[tuple[list[int], list[int]]]:
    """Return (token ids, mask) of each document."""
    data, mask = IndexedDataset(str(out)), open_sidecar(weights_of(str(out)))
    ends = np.cumsum([len(data[i]) for i in range(len(data))])
    return [(data[i].tolist(), mask[end - len(data[i]) : end].tolist()) for i, end in enumerate(ends.tolist())]


@pytest.mark.parametrize("prompt_format", ["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"])
def test_labels_are_those_of_megatrons_own_data_set(prompt_format: str, folder: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.training.datasets.sft_dataset import SFTDataset

    chosen = settings(folder, "SFTTokenizer", sft_tokenizer_prompt_format=prompt_format)
    chats = CHATS[:5]
    write_lines(tmp_path / "in.jsonl", chats)
    summary = written(tmp_path, tmp_path / "out", chosen, "in.jsonl")
    tokenizer = conversations.chat_tokenizer(chosen)[0]
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=128, blend=(["unread"], None), split="1", tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        context_parallel_size=1,
    )  # fmt: skip
    stock = SFTDataset(chats, None, np.arange(5), 5, Split.train, config)  # type: ignore[arg-type]
    found = documents(tmp_path / "out")
    assert (len(found), summary.num_documents) == (5, 5)
    num_trained = 0
    for number, (tokens, mask) in enumerate(found):
        sample, length = stock[number], len(tokens)
        assert length < 128
        assert sample["tokens"][:length].tolist() == tokens
        assert sample["loss_mask"][: length - 1].tolist() == mask[1:]
        assert not sample["loss_mask"][length - 1 :].any()
        num_trained += sum(mask)
    assert num_trained == summary.num_answer_tokens == check_weights(str(tmp_path / "out")).num_nonzero
    assert (num_trained == summary.num_tokens) == (prompt_format == "identity")  # default pads with the end mark


def test_a_tokenizer_with_a_template_marks_its_answers(folder: Path, tmp_path: Path) -> None:
    summary = written(folder, tmp_path / "out", settings(folder, "HuggingFaceTokenizer"))
    tokenizer = conversations.chat_tokenizer(settings(folder, "HuggingFaceTokenizer"))[0]
    assert (summary.num_documents, summary.num_without_answer, summary.num_bad) == (5, 1, 0)
    for messages, (tokens, mask) in zip(CHATS, documents(tmp_path / "out"), strict=False):
        read: Any = tokenizer
        text = read.detokenize(tokens)
        assert all(one["content"] in text for one in messages)
        answers = [token for token, marked in zip(tokens, mask, strict=True) if marked]
        wanted = "".join(f"{one['content']}<SPECIAL_12>\n" for one in messages if one["role"] == "assistant")
        assert read.detokenize(answers) == wanted


def test_several_conversations_of_a_line_are_several_documents(folder: Path, tmp_path: Path) -> None:
    pair = [*chat("a", "b", system="s"), *chat("c", "d", system="t")]
    write_lines(tmp_path / "in.jsonl", [pair, *CHATS[:1]])
    chosen = settings(folder, "SFTTokenizer", sft_tokenizer_prompt_format="nemotron-nano-v2")
    assert written(tmp_path, tmp_path / "out", chosen, "in.jsonl").num_documents == 3
    write_lines(tmp_path / "in.jsonl", [pair[:3], pair[3:], *CHATS[:1]])
    written(tmp_path, tmp_path / "apart", chosen, "in.jsonl")
    assert documents(tmp_path / "out") == documents(tmp_path / "apart")


def test_ids_that_the_file_cannot_hold_name_their_line(folder: Path, tmp_path: Path) -> None:
    vocabulary, encode = conversations.chat_tokenizer(settings(folder, "HuggingFaceTokenizer"))

    class FarIds:
        def __call__(self, conversation: Any) -> list[Any]:
            far = 70000 * ("far" in str(conversation))
            return [(tokens + far, answers) for tokens, answers in encode(conversation)]

        def notes(self) -> list[str]:
            return encode.notes()

    path = write_lines(tmp_path / "in.jsonl", [chat("a", "b", system="s"), chat("far", "d", system="s")])
    with pytest.raises(ValueError, match=r"in\.jsonl:2: the tokenizer gives the token id 7"):
        conversations.write_conversations(str(tmp_path / "out"), file_entries(path), (vocabulary, FarIds()))


def test_bad_lines_stop_or_are_counted(folder: Path, tmp_path: Path) -> None:
    chosen = settings(folder, "SFTTokenizer", sft_tokenizer_prompt_format="nemotron-nano-v2")
    path = write_lines(tmp_path / "in.jsonl", [*CHATS[:2], [message("human", "a")], *CHATS[2:3]])
    path.write_text(path.read_text() + '\n{"messages": [{"ro')
    with pytest.raises(ValueError, match=r"in.jsonl:3: message 1 has the role 'human'"):
        written(tmp_path, tmp_path / "out", chosen, "in.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"], "something half-written was left"
    summary = written(tmp_path, tmp_path / "out", chosen, "in.jsonl", fields=Fields(skip_bad=True))
    assert (summary.num_documents, summary.num_bad, summary.num_skipped_empty) == (3, 2, 0)
    assert "in.jsonl:3: message 1" in summary.first_bad
    write_lines(tmp_path / "in.jsonl", [[message("human", "a")]])
    with pytest.raises(ValueError, match=r"1 lines, and no conversation with an answer.*the first bad line: .*'human'"):
        written(tmp_path, tmp_path / "none", chosen, "in.jsonl", fields=Fields(skip_bad=True))


BAD = {
    "--tokenizer-type NullTokenizer --vocab-size 9": "--sft needs --tokenizer-type SFTTokenizer or HuggingFace",
    "": "--sft needs --tokenizer-type SFTTokenizer or HuggingFaceTokenizer",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {in}/plain": "plain: the tokenizer has no chat template",
    "--tokenizer-type SFTTokenizer --tokenizer-model {in}/plain --sft-tokenizer-prompt-format default": (
        "plain: the tokenizer has no chat template, which 'default' takes"
    ),
    "--tokenizer-type SFTTokenizer": "--tokenizer-type SFTTokenizer needs --tokenizer-model",
    "--tokenizer-type SFTTokenizer --tokenizer-model {in}/none": "none: no such file",
}


@pytest.mark.parametrize("words", BAD)
def test_tokenizers_without_chats_are_refused(words: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=BAD[words]) as error:
        run(tmp_path / "out", "--sft", "--from", folder / "a.jsonl", *words.replace("{in}", str(folder)).split())
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def run(out: Path, *words: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(["--output", str(out), *map(str, words)]))


@pytest.mark.slow
def test_the_report_and_the_flags_of_training(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", folder / "tokenizer"]
    words += ["--sft-tokenizer-prompt-format", "nemotron-nano-v2"]
    assert run(tmp_path / "out", "--sft", "--from", folder, "--on-bad", "skip", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{tmp_path / 'out'}.bin, .idx (uint16), .weights.bin, .weights.json", "chats      5"]
    assert "skipped    0 empty, 1 without an answer" in lines
    assert lines[-1] == f"train with --sft --data-path {tmp_path / 'out'} {' '.join(map(str, words))}"
    assert run(tmp_path / "out", "--sft", "--from", folder, "--json", *words) == 0
    report = json.loads(capsys.readouterr().out)
    weighted = [{**json.loads(line), "a": -0.5} for line in (folder / "a.jsonl").read_text().splitlines()]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in weighted))
    assert (
        run(tmp_path / "w", "--sft", "--from", tmp_path / "w.jsonl", "--weights", "a", "--on-bad", "skip", *words) == 0
    )
    assert set(open_sidecar(weights_of(str(tmp_path / "w"))).tolist()) == {0.0, -0.5}
    for one in tmp_path.glob("w*"):
        one.unlink()
    capsys.readouterr()
    assert (report["num_documents"], report["num_bad"], report["training_flags"][0]) == (5, 0, "--sft")
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"out.bin", "out.idx", "out.weights.bin", "out.weights.json"}
    for line, told in {
        "--on-bad skip": "need --sft",
        "--sft": "--sft needs --from FILE.jsonl",
        f"--sft --from {folder / 'tokenizer' / 'tokenizer.json'}": "conversations are records with the key 'messages'",
    }.items():
        with pytest.raises(ValueError, match=told):
            run(tmp_path / "out", *line.split())


@pytest.mark.slow
def test_lines_of_rollouts_are_groups_with_sidecars(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sft", "--from", tmp_path / "r.jsonl", "--groups", "prompt", "--tokenizer-type", "SFTTokenizer"]
    words += ["--tokenizer-model", folder / "tokenizer", "--sft-tokenizer-prompt-format", "nemotron-nano-v2"]
    lines: list[dict[str, Any]] = [
        {"messages": one, "prompt": name, "r": reward}
        for one, name, reward in zip(CHATS[:5], "aaabb", (1, 0, 0, 2, 1), strict=True)
    ]
    write_records(tmp_path / "r.jsonl", lines)
    assert run(tmp_path / "out", *words, "--rewards", "r") == 0
    assert "chats      5 in 2 groups" in capsys.readouterr().out.splitlines()
    prefix = str(tmp_path / "out")
    assert group_bounds(prefix).tolist() == [0, 3, 5]
    check_sidecar(advantages_of(prefix), prefix, ADVANTAGES)
    masks = [np.array(mask) for _, mask in documents(tmp_path / "out")]
    values = [*((np.array([1, 0, 0]) - 1 / 3) * 3**0.5).tolist(), 0.5**0.5, -(0.5**0.5)]
    wanted = np.concatenate([mask * value for mask, value in zip(masks, values, strict=True)])
    assert open_sidecar(advantages_of(prefix)) == pytest.approx(wanted, rel=1e-5)
    for line, mask in zip(lines, masks, strict=True):
        line |= {"old": (-np.arange(mask.sum()) / 8).tolist(), "a": np.arange(mask.sum()).tolist()}
    write_records(tmp_path / "r.jsonl", lines)
    assert run(tmp_path / "out", *words, "--logprobs", "old", "--advantages", "a") == 0
    check_sidecar(old_logprobs_of(prefix), prefix, LOGPROBS)
    numbers = np.concatenate([mask * (np.cumsum(mask) - 1) for mask in masks])
    assert open_sidecar(old_logprobs_of(prefix)).tolist() == (-numbers / 8).tolist()
    assert open_sidecar(advantages_of(prefix)).tolist() == numbers.tolist()
    write_records(tmp_path / "r.jsonl", [{**lines[0], "messages": CHATS[5]}])
    with pytest.raises(
        ValueError, match=r"r\.jsonl:1: 1 documents, 0 of them with an answer: a line of a group needs one"
    ):
        run(tmp_path / "out", *words)


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


TOGETHER = {
    "--groups g": "--pairs, --groups and --sft-tokenizer-prompt-format need --sft",
    "--sft --rewards r": "--rewards needs --groups KEY",
    "--sft --logprobs r": "--logprobs needs --groups KEY",
    "--sft --groups g --pairs": "--groups with --pairs: groups are written whole",
    "--sft --groups g --tokens 9": "--groups with --tokens",
    "--sft --groups g --on-bad skip": "--groups with --on-bad skip",
    "--sft --groups g --rewards r --advantages a": "--rewards with --advantages",
}


@pytest.mark.parametrize("words", TOGETHER)
def test_options_that_do_not_go_together_are_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=TOGETHER[words]):
        run(tmp_path / "out", *words.split())


def test_pairs_have_one_prompt(folder: Path, tmp_path: Path) -> None:
    words = ["--sft", "--pairs", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", folder / "tokenizer"]
    words += ["--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--from", tmp_path / "p.jsonl"]
    later = {"chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "old", "road", "d")}
    write_records(tmp_path / "p.jsonl", [later])
    assert run(tmp_path / "out", *words) == 0
    write_records(tmp_path / "p.jsonl", [later, {"chosen": chat("a", "b"), "rejected": chat("river", "b")}])
    with pytest.raises(ValueError, match=r"p\.jsonl:2: 'chosen' and 'rejected' differ before the first answer"):
        run(tmp_path / "out", *words)
