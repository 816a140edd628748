"""Quality filters and masking of personal data by datatrove, with counts for each source. Works offline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result

from bytescale_ext.data.clean.languages import has_common_words, script_of
from bytescale_ext.data.clean.own import OwnSteps
from bytescale_ext.data.clean.personal import PersonalData
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.tally import Tally
from bytescale_ext.data.clean.words import RULES, LinedText, letters_per_word

STOP_WORDS: Final = 2  # of a language, in a document that passes
_SHORT_WORDS: Final = ("HANGUL", "HEBREW", "ARABIC")  # their words have fewer letters than English words


class GopherQuality(BaseFilter):  # type: ignore[misc]  # datatrove has no types
    """Gopher's quality rules, with stop words of the document's language, and word lengths of its script."""

    name = "gopher-quality"

    def __init__(self, letters: int, script: str) -> None:
        super().__init__()
        least = None if letters > 1 else 2 if script in _SHORT_WORDS else 3
        self.rules = GopherQualityFilter(min_avg_word_length=least, min_stop_words=None, language=RULES)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether a document passes, and the rule if not."""
        passed, reason = get_filter_result(self.rules.filter(doc))
        if passed and not has_common_words(doc.text, STOP_WORDS):
            passed, reason = False, "gopher_enough_stop_words"
        return True if passed else (False, reason)


@cache
def quality_filter(name: str, letters: int = 1, script: str = "LATIN") -> BaseFilter:
    """Return the filter with a name of ``recipe.FILTERS``, with the thresholds of its paper, which are for English.

    Args:
        name: name of the filter.
        letters: letters of a word in a script without spaces, else 1. A segment there is
            one letter, so thresholds of words are multiplied by ``letters``.
        script: script of the document. C4's rules about the ends and words of lines hold for Latin script alone.
    """
    if name == "gopher-quality":
        return GopherQuality(letters, script)
    if name == "gopher-repetition":
        tops = tuple((letters * words, share) for words, share in ((2, 0.2), (3, 0.18), (4, 0.16)))
        duplicates = tuple((letters * words, round(0.2 - words / 100, 2)) for words in range(5, 11))
        return GopherRepetitionFilter(top_n_grams=tops, dup_n_grams=duplicates, language=RULES)
    if name == "c4":
        is_latin = script == "LATIN"
        least = 3 if letters == 1 else -1
        return C4QualityFilter(filter_no_terminal_punct=is_latin, min_words_per_line=least, language=RULES)
    share = 0.0 if letters == 4 else 0.12  # Thai and Lao end lines without punctuation
    return FineWebQualityFilter(line_punct_thr=share, short_line_length=30 if letters != 2 else 15, language=RULES)


class DocumentFilter(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Drops documents by their keys, by the filters of their source and by own steps, then masks personal data."""

    name = "gate"
    type = "filter"

    def __init__(self, recipe: Recipe, tallies: Path) -> None:
        super().__init__()
        self.tallies = tallies
        self.filters = {source.name: source.filters if "filters" in recipe.steps else () for source in recipe.sources}
        self.keep = {source.name: source.keep for source in recipe.sources}
        self.own = recipe.own
        self.mask = PersonalData() if "pii" in recipe.steps else None

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that pass the filters, with masked text."""
        tally, own = Tally(), OwnSteps(self.own)
        for document in data:
            source = str(document.metadata["source"])
            rule = self.refusal(document, source) or own.refusal(document)
            if rule is not None:
                tally.add(source, f"filter {rule}", num_bytes=len(document.text.encode("utf-8", "surrogatepass")))
                tally.example(f"filter {rule}", document.id, document.text)
                continue
            self.masked(document, source, tally)
            yield document
        tally.save(self.tallies / f"filter-{rank:05d}.json")

    def refusal(self, document: Document, source: str) -> str | None:
        """Return ``filter: rule`` of the first condition or filter that rejects a document, or None."""
        keys = document.metadata.get("keys", {})
        for condition in self.keep[source]:
            if not condition.is_met(keys):
                return f"keep: {condition.key}"
        names = self.filters[source]
        kind = (letters_per_word(document.text), script_of(document.text)) if names else ()
        for name in names:
            document.text = LinedText(document.text)
            passed, reason = get_filter_result(quality_filter(name, *kind).filter(document))
            document.text = str(document.text)
            if not passed:
                return f"{name}: {reason}"
        return None

    def masked(self, document: Document, source: str, tally: Tally) -> None:
        """Mask the text of a document in place."""
        if self.mask is None:
            return
        text = self.mask.masked(document.text)
        if text != document.text:
            tally.add(source, "masked")
            place = next((i for i, (a, b) in enumerate(zip(document.text, text, strict=False)) if a != b), 0)
            tally.example("masked", document.id, text[max(place - 40, 0) :])
            document.text = text
