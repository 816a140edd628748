"""The configuration of Megatron's ``pretrain``, from the arguments of a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.e2e.training import MODEL
from tests.harness import run_ranks

WORDS = [*MODEL, *"--train-iters 2 --lr 1e-3 --global-batch-size 2 --micro-batch-size 1 --attention-dropout 0".split()]


def answers(rank: int, world: int, lines: Sequence[list[str]]) -> list[str]:
    """Return the refusal of each command line, or the name of the optimizer that Megatron will build."""
    from megatron.bytescale.training.pretrain_arguments import pretrain_config, stock_training
    from tests.bytescale.arguments.resolving import checked

    found = []
    for words in lines:
        args = checked(1, words)
        try:
            found.append(pretrain_config(args, stock_training(args).model).optimizer.optimizer)
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.ranks
def test_settings_that_megatron_checks_late_are_refused_in_one_line() -> None:
    """Megatron checks them in the configuration of its optimizer, after its checks of arguments."""
    precise = "--use-precision-aware-optimizer"
    rows = {
        "": "adam",
        "--optimizer sgd": "sgd",
        f"{precise} --use-distributed-optimizer": "requires FusedAdam from TransformerEngine",
    }
    found = run_ranks(answers, 1, [[*WORDS, *flags.split()] for flags in rows], init_group=False)[0]
    for text, part in zip(found, rows.values(), strict=True):
        assert part in text
        assert text == part or text.startswith("Megatron refuses these arguments: ")
        assert "\n" not in text
