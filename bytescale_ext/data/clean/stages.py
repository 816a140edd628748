"""Stages of cleaning a corpus. No stage needs memory for more than the documents of a task and its own limit."""

from __future__ import annotations

from pathlib import Path

from datatrove.pipeline.dedup import MinhashDedupBuckets

from bytescale_ext.data.clean.equal import FindEqual
from bytescale_ext.data.clean.gates import DocumentFilter
from bytescale_ext.data.clean.near import Decide, Pairs, Signatures, Unequal, Verify, minhash_config
from bytescale_ext.data.clean.output import Write
from bytescale_ext.data.clean.readers import Collect
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.sentences import FindRepeated, SentenceFilter, SentenceSignatures
from bytescale_ext.data.clean.settle import Settle
from bytescale_ext.data.clean.shelf import Shelve, Survivors
from bytescale_ext.data.tasks.stages import DEFAULT_MEMORY_GB, Stage, Step


def stages_of(recipe: Recipe, work: Path, last: Step, memory_gb: float = DEFAULT_MEMORY_GB) -> list[Stage]:
    """Return the stages in order.

    Args:
        recipe: recipe of the corpus.
        work: folder of the files that tasks exchange.
        last: step that runs once, after all parts are written.
        memory_gb: memory that a task may use for the shingles and pairs of near-duplicates, in GB.
    """
    names, tallies, tasks = tuple(source.name for source in recipe.sources), work / "tallies", recipe.tasks
    collect: list[Step] = [Collect(recipe, tallies), DocumentFilter(recipe, tallies), Shelve(names, work)]
    stages = [Stage("collect", tasks, collect), Stage("equal", tasks, [FindEqual(recipe, work)])]
    if "near" in recipe.steps:
        signatures, config = work / "signatures", minhash_config(recipe)
        buckets = MinhashDedupBuckets(str(signatures), str(work / "matches"), config=config)
        stages += [
            Stage("sign", tasks, [Unequal(work), Signatures(recipe, signatures)]),
            Stage("match", recipe.buckets, [buckets, Pairs(work, tasks)]),
            Stage("verify", tasks, [Verify(recipe, work, memory_gb)]),
            Stage("decide", 1, [Decide(work, tasks, memory_gb)]),
        ]
    survivors: list[Step] = [Settle(recipe, work), Survivors(names, work)]
    if "sentences" not in recipe.steps:
        return [*stages, Stage("write", tasks, [*survivors, Write(recipe, work)]), Stage("finish", 1, [last])]
    signed, repeated = work / "sentences", work / "repeated"
    clean = SentenceFilter(recipe, repeated, tallies)
    return [
        *stages,
        Stage("sentences", tasks, [*survivors, SentenceSignatures(recipe, signed)]),
        Stage("repeated", tasks, [FindRepeated(signed, repeated)]),
        Stage("write", tasks, [Survivors(names, work), clean, Write(recipe, work, clean.close)]),
        Stage("finish", 1, [last]),
    ]
