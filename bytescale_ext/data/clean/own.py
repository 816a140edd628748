"""Steps of one's own in a recipe: a step of datatrove, or any function, from a module or a Python file."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final, cast

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.pipeline.formatters.base import BaseFormatter

from bytescale_ext.data.clean.recipe import CLASSIFIER, OwnStep, Recipe
from bytescale_ext.data.clean.words import LinedText
from bytescale_ext.errors import one_line

_Step = Callable[..., object]
_SAFE: Final = {
    "datatrove.pipeline.filters": (
        "C4ParagraphFilter", "C4QualityFilter", "FineWebQualityFilter", "GopherQualityFilter",
        "GopherRepetitionFilter", "SamplerFilter",
    ),
    "datatrove.pipeline.formatters": ("FTFYFormatter", "PIIFormatter", "SymbolLinesFormatter"),
}  # fmt: skip
"""Steps that run no code, download nothing and end. Others fetch models or lists, or match any regular expression."""
_WRITER: Final = "exclusion_writer"
_NAMED: Final = {CLASSIFIER: "bytescale_ext.data.clean.classifiers:Classifier"}


class OwnSteps:
    """The own steps of a recipe. A task imports them when it starts.

    A function takes the text and the keys of a document, which it may change. It returns True to keep the document,
    False to drop it, or another text. A filter of datatrove drops documents, and a formatter changes the text. Any
    other step of datatrove gets one document at a time and drops it by yielding none.
    """

    def __init__(self, steps: tuple[OwnStep, ...]) -> None:
        self._steps = [(step.use, _loaded(step)) for step in steps]

    def refusal(self, document: Document) -> str | None:
        """Run the steps, which may change the document; return the step that drops it and its reason, or None."""
        for name, step in self._steps:
            reason = _run(step, document)
            if reason is not None:
                return f"{name}: {reason}"
        return None


def check_own_steps(recipe: Recipe) -> None:
    """Raise ValueError for a step that cannot be imported or created."""
    OwnSteps(recipe.own)


def check_needs_no_trust(recipe: Recipe) -> None:
    """Raise ValueError for a step that can run code of the recipe's author, or download files, or run without end.

    Steps of ``_SAFE`` need no trust, and nor do classifiers without types that the recipe trusts.
    """
    for step in recipe.own:
        if not _is_safe(step):
            raise ValueError(
                f"step {step.use}: it can run code, download files or run without end, so read the recipe and give "
                "--trust-recipe"
            )


def _is_safe(step: OwnStep) -> bool:
    options = dict(step.options)
    if step.use == CLASSIFIER:
        return not options.get("trusted")
    place, _, name = step.use.rpartition(":")
    return name in _SAFE.get(place, ()) and _WRITER not in options


def _run(step: _Step, document: Document) -> str | None:
    """Run one step on a document; return the reason to drop the document, or None. Raises ValueError, with the id."""
    keys = document.metadata.setdefault("keys", {})
    try:
        if not isinstance(step, PipelineStep):
            return _taken(document, step(document.text, keys))
        # Steps of datatrove read and set keys there.
        inner = Document(LinedText(document.text), document.id, metadata=keys)
        if isinstance(step, BaseFilter):
            passed, reason = get_filter_result(step.filter(inner))
            return None if passed else str(reason or "dropped")
        if isinstance(step, BaseFormatter):
            return _taken(document, step.format(inner.text))
        left = list(step.run(iter([inner])))
        return _taken(document, left[0].text if left else False)
    except Exception as error:  # the user's code
        what = f"{type(error).__name__}: {one_line(error, 200)}"
        raise ValueError(f"{document.id}: a step of the recipe fails ({what})") from error


def _taken(document: Document, result: object) -> str | None:
    """Give a document its new text, or return the reason to drop it. Raises TypeError for other results."""
    if isinstance(result, str):
        document.text = str(result)
        return None
    if not isinstance(result, bool):
        raise TypeError(f"a step returns True, False or a text, not {type(result).__name__}")
    return None if result else "dropped"


def _loaded(step: OwnStep) -> _Step:
    """Import a step and give it its options. Raises ValueError if it cannot be imported or created."""
    place, _, name = _NAMED.get(step.use, step.use).rpartition(":")
    options = dict(step.options)
    try:
        found = getattr(_module(place), name)
        if inspect.isclass(found):
            found, options = found(**options), {}
        if isinstance(found, PipelineStep):
            return cast(_Step, found)
        if not callable(found):
            raise TypeError(f"{name} cannot be called")
        inspect.signature(found).bind("", {}, **options)
    except Exception as error:  # the user's code
        raise ValueError(f"step {step.use}: {type(error).__name__}: {one_line(error, 200)}") from error
    return functools.partial(found, **options)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
