"""Models that one version of transformers has converted to Megatron and back are read by another version.

``make transformers4`` calls ``write`` and ``read`` with the interpreters of two environments.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from tests.bytescale.convert.models import IS_VERSION_4, MODELS, UNLIKE_IN_VERSION_4


def write(folder: Path) -> None:
    """Write a model of each family, its logits, and the model after the round trip."""
    from tests.bytescale.convert.test_folders import write_models

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_models(folder)


def read(folder: Path) -> None:
    """Compare the logits of the models after the round trip with the stored logits of the written models."""
    import transformers

    for kind in MODELS:
        if not (folder / f"{kind}.pt").exists() or (IS_VERSION_4 and kind in UNLIKE_IN_VERSION_4):
            continue
        tokens, logits = torch.load(folder / f"{kind}.pt")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{kind}-back", dtype=torch.float32).eval()
        difference = float((model(tokens).logits - logits).abs().max() / logits.abs().max())
        print(f"transformers {transformers.__version__}: {kind} differs by {difference:.1e}")
        assert difference < 1e-5, kind


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
