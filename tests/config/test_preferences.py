"""Settings of losses of pairs are values."""

from __future__ import annotations

from bytescale_ext.config.preferences import PreferenceConfig


def test_a_loss_without_reference_names_no_sidecar() -> None:
    assert PreferenceConfig("simpo", 2.0).references == ()
    assert hash(PreferenceConfig("dpo", 0.1, (("data", "reference"),)))
