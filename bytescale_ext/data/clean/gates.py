"""Filters of quality and the masking of personal data, with counts by source: datatrove's, offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.pipeline.formatters import PIIFormatter

from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.tally import Tally
from bytescale_ext.data.clean.words import RULES

EMAIL = "email@example.com"
ADDRESS = "192.0.2.1"  # of a range that is reserved for documentation


def quality_filter(name: str) -> BaseFilter:
    """Return a filter of the recipe's ``FILTERS``, with the thresholds of its paper."""
    made = {
        "gopher-quality": GopherQualityFilter,
        "gopher-repetition": GopherRepetitionFilter,
        "c4": C4QualityFilter,
        "fineweb": FineWebQualityFilter,
    }
    return made[name](language=RULES)


class Gate(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Drop documents that a filter of their source refuses, then mask addresses of mail and public addresses of IP."""

    name = "gate"
    type = "filter"

    def __init__(self, recipe: Recipe, told: Path) -> None:
        super().__init__()
        self.told = told
        self.filters = {
            source.name: {one: quality_filter(one) for one in source.filters if "filters" in recipe.steps}
            for source in recipe.sources
        }
        self.mask = PIIFormatter(email_replacement=EMAIL, ip_replacement=ADDRESS) if "pii" in recipe.steps else None

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that stay; their text may have changed."""
        tally = Tally()
        for document in data:
            source = str(document.metadata["source"])
            refused = self.refusal(document, source)
            if refused is not None:
                tally.add(source, f"filter {refused}", num_bytes=len(document.text.encode("utf-8", "surrogatepass")))
                tally.example(f"filter {refused}", document.id, document.text)
                continue
            self.masked(document, source, tally)
            yield document
        tally.save(self.told / f"gate-{rank:05d}.json")

    def refusal(self, document: Document, source: str) -> str | None:
        """Return the filter and the rule that refuse a document, or None."""
        for name, one in self.filters[source].items():
            passed, reason = get_filter_result(one.filter(document))
            if not passed:
                return f"{name}: {reason}"
        return None

    def masked(self, document: Document, source: str, tally: Tally) -> None:
        """Mask the text of a document in place."""
        if self.mask is None:
            return
        text = self.mask.format(document.text)
        if text != document.text:
            tally.add(source, "masked")
            place = next((i for i, (a, b) in enumerate(zip(document.text, text, strict=False)) if a != b), 0)
            tally.example("masked", document.id, text[max(place - 40, 0) :])
            document.text = text
