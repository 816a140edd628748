"""Classifiers of each format, with fakes of the packages that read them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bytescale_ext.data.clean.classifiers import Classifier
from bytescale_ext.data.clean.own import OwnSteps, check_own_steps
from bytescale_ext.data.clean.recipe import OwnStep, Recipe
from tests.data.cleaning import document


def share(text: str) -> float:
    """Return the probability of good that the fakes give: the share of the letter g."""
    return text.count("g") / max(len(text), 1)


class FastText:
    labels = ("__label__good", "__label__bad")

    def predict(self, text: str, k: int) -> tuple[tuple[str, ...], np.ndarray]:
        assert "\n" not in text
        assert k == -1
        return self.labels, np.array([share(text), 1 - share(text)])


class ScikitLearn:
    classes_ = np.array(["bad", "good"])

    def predict_proba(self, texts: list[str]) -> np.ndarray:
        return np.array([[1 - share(text), share(text)] for text in texts])


class Session:
    def __init__(self, path: str, providers: list[str]) -> None:
        self.is_zipped = "zip" in path

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="text", shape=[None, 1], type="tensor(string)")]

    def run(self, outputs: None, inputs: dict[str, np.ndarray]) -> list[object]:
        ((text,),) = inputs["text"].tolist()
        shares = {"bad": 1 - share(text), "good": share(text)}
        return [np.array(["?"]), [shares] if self.is_zipped else np.array([list(shares.values())])]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    skops = SimpleNamespace(get_untrusted_types=lambda file: ["mine.Vectors"], load=lambda path, trusted: ScikitLearn())
    monkeypatch.setitem(sys.modules, "fasttext", SimpleNamespace(load_model=lambda path: FastText()))
    monkeypatch.setitem(sys.modules, "skops", SimpleNamespace(io=skops))
    monkeypatch.setitem(sys.modules, "skops.io", skops)
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=Session))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.bin", {"label": "good"}),
        ("a.ftz", {"label": "good"}),
        ("a.skops", {"trusted": ["mine.Vectors"]}),
        ("a.onnx", {"label": "1"}),
        ("zip.onnx", {}),
    ],
)
def test_the_score_is_a_key_and_a_limit(name: str, options: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / name).touch()
    step = OwnStep("classifier", (("model", str(tmp_path / name)), ("least", 0.5), *options.items()))
    steps = OwnSteps((step,))
    good, bad = document("ggg\n"), document("ab")
    assert steps.refusal(good) is None
    assert good.metadata["keys"] == {"score": 0.75}
    assert steps.refusal(bad) == "classifier: dropped"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none.bin", {}, "none.bin: no such file"),
        ("a.pkl", {}, "a pickle runs its code when it is read: save the model with skops, or as ONNX"),
        ("a.txt", {}, "give .bin or .ftz"),
        ("a.skops", {}, "contains the types mine.Vectors"),
        ("a.bin", {"label": "fine"}, "has no label 'fine': give one of bad, good"),
        ("a.bin", {"most": 1}, "unexpected keyword argument 'most'"),
    ],
)
def test_bad_models_are_one_line(name: str, options: dict[str, object], message: str, tmp_path: Path) -> None:
    for given in ("a.bin", "a.pkl", "a.txt", "a.skops"):
        (tmp_path / given).touch()
    recipe = Recipe((), own=(OwnStep("classifier", (("model", str(tmp_path / name)), *options.items())),))
    with pytest.raises(ValueError, match=message) as caught:
        check_own_steps(recipe)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.onnx").touch()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match=r"a\.onnx needs onnxruntime: pip install onnxruntime"):
        Classifier(str(tmp_path / "a.onnx"))


def test_a_folder_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Logits(list[float]):
        def tolist(self) -> list[float]:
            return list(self)

    class Model:
        config = SimpleNamespace(id2label={0: "bad", 1: "good"}, num_labels=2, max_position_embeddings=4)

        def eval(self) -> Model:
            return self

        def __call__(self, text: str) -> SimpleNamespace:
            return SimpleNamespace(logits=[Logits([0.0, float(text.count("g"))])])

    class Tokenizer:
        model_max_length = 9

        def __call__(self, text: str, truncation: bool, max_length: int, return_tensors: str) -> dict[str, str]:
            return {"text": text[:max_length]}

    def loader(found: object) -> SimpleNamespace:
        def load(path: Path, local_files_only: bool, trust_remote_code: bool) -> object:
            assert local_files_only
            assert not trust_remote_code
            return found

        return SimpleNamespace(from_pretrained=load)

    fake = SimpleNamespace(AutoTokenizer=loader(Tokenizer()), AutoModelForSequenceClassification=loader(Model()))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    keys: dict[str, object] = {}
    assert Classifier(str(tmp_path), key="grade")("gggggg", keys)
    assert keys == {"grade": pytest.approx(1 / (1 + np.exp(-4)), abs=1e-6)}
