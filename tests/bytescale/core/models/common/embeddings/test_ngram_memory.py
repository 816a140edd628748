"""Memory of one layer: its output, initial values, and compatible checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.tables import NgramConfig
from bytescale_ext.data.samples.grams import GramRule
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

RULE = GramRule((1, 2), 2, 40)
SETTINGS = NgramConfig((2, 3), RULE, 4, 5)


def memory_of(rule: GramRule, layer: int, value: float = 0.0, **options: Any) -> Any:
    """Return the memory of a layer of a small model, with the fields in ``value`` set."""
    from megatron.core.transformer import TransformerConfig

    from megatron.bytescale.core.models.common.embeddings.ngram_memory import NgramMemory

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    config = TransformerConfig(num_layers=4, hidden_size=6, num_attention_heads=2, use_cpu_initialization=True)
    memory = NgramMemory(config, NgramConfig((2, 3), rule, 4, 5), layer)
    torch.nn.init.constant_(memory.value, value)
    return memory


def made(rank: int, world: int) -> dict[str, Any]:
    rows = torch.from_numpy(RULE.rows_of(torch.tensor([3, 1, 4, 1, 5]).numpy()))
    hidden = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    new, trained = memory_of(RULE, 2), memory_of(RULE, 2, 0.5)
    added = trained(hidden, rows)
    added.sum().backward()
    refused = []
    for other in (GramRule((1, 3), 2, 40), GramRule((1, 2), 2, 40, seed=1), GramRule((1, 2, 3, 4), 1, 40)):
        try:
            trained.load_state_dict(memory_of(other, 2).state_dict())
        except ValueError as error:
            refused.append(str(error))
    trained.load_state_dict(new.state_dict())
    return {
        "hidden": hidden.detach(),
        "begins as": new(hidden, rows).detach(),
        "added": added.detach(),
        "of padding": trained(hidden, None).detach(),
        "touched": (added.grad_fn is not None, trained.table.grad.abs().sum(1)),
        "rows": rows,
        "layers": [memory_of(RULE, layer).table.detach() for layer in (2, 2, 3)],
        "refused": refused,
        "loaded": trained.value.detach(),
        "names": sorted(new.state_dict()),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks(made, 1)[0]  # type: ignore[no-any-return]


def test_a_new_memory_adds_nothing(found: dict[str, Any]) -> None:
    assert (found["begins as"] == found["hidden"]).all()
    assert found["added"].shape == (5, 1, 6)
    assert (found["added"] != found["hidden"]).all()
    assert found["of padding"].shape == (5, 1, 6)


def test_tables_differ_between_layers_and_follow_from_the_seed(found: dict[str, Any]) -> None:
    first, again, other = found["layers"]
    assert (first == again).all()
    assert (first != other).any()
    assert float(first.std()) == pytest.approx(0.02, rel=0.2)


def test_a_table_of_other_hashes_is_refused(found: dict[str, Any]) -> None:
    assert len(found["refused"]) == 3
    assert all("trained with other --ngram-orders, --ngram-heads or --ngram-rows" in one for one in found["refused"])
    assert (found["loaded"] == 0).all()
    assert found["names"] == ["fingerprint", "key", "table", "value"]
