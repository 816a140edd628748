"""Quality filters and masking of personal data by datatrove, with counts for each source. Works offline."""

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
ADDRESS = "192.0.2.1"  # from a range that is reserved for documentation


def quality_filter(name: str) -> BaseFilter:
    """Return the filter with a name of ``recipe.FILTERS``, with the thresholds of its paper."""
    kinds = {
        "gopher-quality": GopherQualityFilter,
        "gopher-repetition": GopherRepetitionFilter,
        "c4": C4QualityFilter,
        "fineweb": FineWebQualityFilter,
    }
    return kinds[name](language=RULES)


class DocumentFilter(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Drops documents that a filter of their source rejects, then masks e-mail addresses and public IP addresses."""

    name = "gate"
    type = "filter"

    def __init__(self, recipe: Recipe, tallies: Path) -> None:
        super().__init__()
        self.tallies = tallies
        self.filters = {
            source.name: {name: quality_filter(name) for name in source.filters if "filters" in recipe.steps}
            for source in recipe.sources
        }
        self.mask = PIIFormatter(email_replacement=EMAIL, ip_replacement=ADDRESS) if "pii" in recipe.steps else None

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that pass the filters, with masked text."""
        tally = Tally()
        for document in data:
            source = str(document.metadata["source"])
            rule = self.refusal(document, source)
            if rule is not None:
                tally.add(source, f"filter {rule}", num_bytes=len(document.text.encode("utf-8", "surrogatepass")))
                tally.example(f"filter {rule}", document.id, document.text)
                continue
            self.masked(document, source, tally)
            yield document
        tally.save(self.tallies / f"filter-{rank:05d}.json")

    def refusal(self, document: Document, source: str) -> str | None:
        """Return ``filter: rule`` of the first filter that rejects a document, or None."""
        for name, quality in self.filters[source].items():
            passed, reason = get_filter_result(quality.filter(document))
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
