"""The budget of pages."""

from __future__ import annotations

import pytest

from bytescale_ext.config.memory.states import StateConfig


def test_the_message_names_a_budget_that_is_enough() -> None:
    config = StateConfig(1024, 2e9)
    config.check_fits(2e9)
    with pytest.raises(ValueError, match=r"take 2\.001 GB .* and there are 2 GB: raise --state-host-gb"):
        config.check_fits(2_000_000_001)
