"""``bytescale logprobs``: log-probabilities of transformers in every layout, resumed runs, and refusals."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bytescale_ext.data.corpus.sidecar import LOGPROBS, check_sidecar, open_sidecar
from tests.bytescale.convert.models import VOCAB, configuration_of
from tests.e2e.corpora import write_documents
from tests.e2e.once import once
from tests.e2e.training import HDP, TRAIN, train_ranks
from tests.harness import run_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

LENGTHS = (200, 3, 64, 65, 130, 1, 17, 40, 9)
LAYOUTS: dict[str, tuple[int, str]] = {
    "rings": (4, "--hdp-tokens-per-rank 64"),
    "pipeline in slices, tensor parallelism": (
        4,
        "--hdp-tokens-per-rank 256 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --seq1f1b-slices 2",
    ),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """Return the folder of a model and a data set, the model's flags and its log-probabilities by transformers."""
    return once(write, "log-probabilities")


def write(folder: Path) -> dict[str, Any]:
    import transformers

    torch.manual_seed(3)
    values = {**configuration_of("llama"), "dtype": "float32"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING["llama"](**values)).float().eval()
    model.save_pretrained(folder / "model")
    flags = run_ranks(convert, 1, folder, timeout=600)[0]
    write_documents(folder / "docs", lengths=LENGTHS, copies=1)
    tokens = torch.from_numpy(np.fromfile(folder / "docs.bin", dtype=np.uint16).astype(np.int64))
    wanted = []
    for document in tokens.split(list(LENGTHS)):
        logits = model(document[None]).logits[0, :-1].detach()
        found = logits.log_softmax(-1).gather(1, document[1:, None])[:, 0]
        wanted += [0.0, *found.tolist()]
    return {"folder": folder, "flags": flags, "wanted": wanted}


def convert(rank: int, world: int, folder: Path) -> list[str]:
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.convert.folders import from_hugging_face

    return list(from_hugging_face(folder / "model", folder / "megatron", None).flags)


def command(stops_after: int | None = None) -> None:
    """Entry of the ranks that runs ``bytescale`` and, in a test, dies after some steps."""
    from megatron.bytescale import cli
    from megatron.bytescale.training.logprobs import Recorder

    if stops_after is not None:
        write, steps = Recorder.write, iter(range(stops_after))

        def write_or_die(self: Recorder) -> None:
            write(self)
            if next(steps, None) is None:
                raise SystemExit(7)

        Recorder.write = write_or_die  # type: ignore[method-assign]
    raise SystemExit(cli.main(sys.argv[1:]) or None)


def words_of(made: dict[str, Any], output: Path, layout: str, *options: object) -> list[object]:
    folder = made["folder"]
    named = ["--load", folder / "megatron", "--data", folder / "docs", "--output", output, *options]
    words = [*made["flags"], *TRAIN, *HDP, "--seq-length", 256, "--ckpt-format", "torch_dist"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1, *layout.split()]
    return ["logprobs", *named, "--", *words]


@pytest.mark.parametrize("name", sampled(LAYOUTS, ["pipeline in slices, tensor parallelism"]))
def test_log_probabilities_are_those_of_transformers(name: str, made: dict[str, Any], tmp_path: Path) -> None:
    num_ranks, layout = LAYOUTS[name]
    first, *_ = train_ranks(num_ranks, *words_of(made, tmp_path / "out", layout, "--json"), entry=command)
    assert first.code is None, first.text[-3000:]
    found = open_sidecar(str(tmp_path / "out"))
    assert found == pytest.approx(np.array(made["wanted"], dtype=np.float32), abs=1e-5)
    header = check_sidecar(str(tmp_path / "out"), str(made["folder"] / "docs"), LOGPROBS)
    assert header.num_nonzero == sum(LENGTHS) - len(LENGTHS)
    assert not (tmp_path / "out.progress.json").exists()


def test_a_killed_run_goes_on(made: dict[str, Any], tmp_path: Path) -> None:
    words = words_of(made, tmp_path / "out", "--hdp-tokens-per-rank 256", "--documents", 3)
    assert train_ranks(1, *words, entry=partial(command, 2))[0].code == 7
    progress = json.loads((tmp_path / "out.progress.json").read_text())
    assert progress["num_documents"] == 6
    with pytest.raises(ValueError, match=r"out\.json: no such file, so the log-probabilities are unknown"):
        check_sidecar(str(tmp_path / "out"), str(made["folder"] / "docs"), LOGPROBS)
    (tmp_path / "out.progress.json").write_text(json.dumps({**progress, "model": "another"}))
    (refused,) = train_ranks(1, *words, entry=command)
    assert refused.code == 2
    assert "out.progress.json is of another model or data set (another): delete it" in refused.text
    (tmp_path / "out.progress.json").write_text(json.dumps(progress))
    (resumed,) = train_ranks(1, *words, entry=command)
    assert "Evaluating iter 1/1" in resumed.text
    assert open_sidecar(str(tmp_path / "out")) == pytest.approx(np.array(made["wanted"], dtype=np.float32), abs=1e-5)
