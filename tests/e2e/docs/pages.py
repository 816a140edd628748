"""Commands on the pages of the docs, and the sizes at which tests run them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.corpora import VOCAB

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

TRAINING_SIZES = {
    "--hdp-tokens-per-rank": "128", "--global-batch-size": "4", "--seq-length": "256", "--vocab-size": str(VOCAB),
    "--max-position-embeddings": "256", "--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4",
    "--train-iters": "2", "--lr-warmup-iters": "1",
}  # fmt: skip
OFF_ON_CPU = {"--bf16"}
FOR_TESTS = ["--ckpt-format", "torch", "--num-workers", "0", "--no-one-logger"]


def code_lines(text: str) -> list[str]:
    """Return the commands of the ``bash`` blocks, with continued lines joined and without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line for line in joined.splitlines() if shlex.split(line, comments=True)]


def with_values(flags: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the flags with these values instead of their own. Values of absent flags are ignored."""
    return [values.get(flag, word) for flag, word in zip(["", *flags], flags, strict=False)]


def small_training(flags: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the flags of a training on CPU at test sizes, with further values from ``values``."""
    shrunk = with_values(flags, {**TRAINING_SIZES, **values})
    return [word for word in shrunk if word not in OFF_ON_CPU] + FOR_TESTS
