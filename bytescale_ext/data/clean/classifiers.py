"""Classifier of documents from a file: fastText, scikit-learn saved by skops, ONNX, or a Hugging Face folder.

Each format needs its own package, which is imported when a recipe uses it. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np

Scores = Callable[[str], dict[str, float]]
"""Function from a text to the probability of each label."""

_PICKLES: Final = (".pkl", ".pickle", ".joblib")
_PREFIX: Final = "__label__"  # of fastText's labels


class Classifier:
    """Step that writes the probability of a label to a key of each document, and drops documents below a limit.

    Args:
        model: ``.bin`` or ``.ftz`` of fastText, ``.skops``, ``.onnx`` of a model that takes texts, or a folder of a
            sequence classifier of Hugging Face.
        label: label whose probability is the score; may be omitted if there are two labels: then it is the second.
        key: key of the score.
        least: smallest score of a document that stays; None: all stay.
        trusted: types that a ``.skops`` file may contain in addition to the types that skops trusts.

    Raises:
        ValueError: the file is missing, of another format, or contains types that are not trusted; or there is no such
            label.
        ModuleNotFoundError: the package of the format is not installed.
    """

    def __init__(
        self,
        model: str,
        label: str | None = None,
        key: str = "score",
        least: float | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        self._scores = _opened(Path(model), trusted)
        self._key = key
        self._least = least
        labels = list(self._scores("a"))
        if label is None and len(labels) != 2:
            raise ValueError(f"{model} has {len(labels)} labels: give label, one of {', '.join(sorted(labels)[:20])}")
        self._label = labels[1] if label is None else label
        if self._label not in labels:
            raise ValueError(f"{model} has no label {self._label!r}: give one of {', '.join(sorted(labels)[:20])}")

    def __call__(self, text: str, keys: MutableMapping[str, object]) -> bool:
        """Write the score of a text to its keys, and return whether the document stays."""
        score = self._scores(text)[self._label]
        keys[self._key] = round(score, 6)
        return self._least is None or score >= self._least


def _opened(path: Path, trusted: Sequence[str]) -> Scores:
    """Return the function of a model. Raises ValueError if it is missing or of another format."""
    formats = {".bin": _fast_text, ".ftz": _fast_text, ".onnx": _onnx}
    if path.is_dir():
        return _hugging_face(path)
    if path.suffix in _PICKLES:
        raise ValueError(f"{path}: a pickle runs its code when it is read: save the model with skops, or as ONNX")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".skops":
        return _scikit_learn(path, trusted)
    if path.suffix not in formats:
        raise ValueError(f"{path}: give .bin or .ftz (fastText), .skops, .onnx, or a folder of Hugging Face")
    return formats[path.suffix](path)


def _package(name: str, path: Path, distribution: str) -> ModuleType:
    """Import a package. Raises ModuleNotFoundError, which names its distribution, if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} needs {name}: pip install {distribution}") from error


def _fast_text(path: Path) -> Scores:
    model = _package("fasttext", path, "fasttext-predict").load_model(str(path))
    names = sorted(model.labels)

    def scores(text: str) -> dict[str, float]:
        labels, shares = model.predict(text.replace("\n", " "), k=-1)
        found = {str(label): float(share) for label, share in zip(labels, shares, strict=True)}
        return {name.removeprefix(_PREFIX): found.get(name, 0.0) for name in names}

    return scores


def _scikit_learn(path: Path, trusted: Sequence[str]) -> Scores:
    skops = _package("skops.io", path, "skops")
    unknown = sorted(set(skops.get_untrusted_types(file=path)) - set(trusted))
    if unknown:
        raise ValueError(f"{path} contains the types {', '.join(unknown)}: give them as trusted if you know the file")
    model = skops.load(path, trusted=list(trusted))
    return lambda text: _by_label(model.classes_, model.predict_proba([text])[0])


def _onnx(path: Path) -> Scores:
    runtime = _package("onnxruntime", path, "onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    if given.type != "tensor(string)":
        raise ValueError(f"{path}: the input is {given.type}: export the model with its text vectorizer")

    def scores(text: str) -> dict[str, float]:
        values = np.array([text], dtype=object).reshape([1] * max(len(given.shape), 1))
        shares = session.run(None, {given.name: values})[-1]
        if isinstance(shares[0], dict):  # labels by name (ZipMap)
            return {str(label): float(share) for label, share in shares[0].items()}
        return _by_label(range(len(shares[0])), shares[0])

    return scores


def _hugging_face(path: Path) -> Scores:
    torch, transformers = (_package(name, path, name) for name in ("torch", "transformers"))
    kind = transformers.AutoModelForSequenceClassification
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    model = kind.from_pretrained(path, local_files_only=True, trust_remote_code=False).eval()
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]

    def scores(text: str) -> dict[str, float]:
        inputs = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**inputs).logits[0].tolist()
        if len(logits) == 1:  # a regression, such as a grade
            return {names[0]: logits[0]}
        total = math.log(sum(math.exp(logit - max(logits)) for logit in logits)) + max(logits)
        return _by_label(names, [math.exp(logit - total) for logit in logits])

    return scores


def _by_label(labels: Sequence[object], shares: Sequence[float]) -> dict[str, float]:
    return {str(label): float(share) for label, share in zip(labels, shares, strict=True)}
