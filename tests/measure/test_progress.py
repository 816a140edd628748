"""Figures of a log line about the progress of a training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.measure.progress import Progress, peak_flops

FULL = Progress(1.2345, 2.5, 3e-4, 1.25, 1234567, 3725.4, 0.4123)


def test_the_line() -> None:
    assert FULL.line() == (
        " run: 1.23 s/step | loss of the last step 2.5000 | learning rate 3.00e-04 | gradient norm 1.250 | "
        "1,234,567 tokens so far | ETA 1:02:05 | MFU 41.2%"
    )
    unknown = replace(FULL, loss=None, learning_rate=None, gradient_norm=None, mfu=None)
    assert unknown.line() == " run: 1.23 s/step | 1,234,567 tokens so far | ETA 1:02:05"


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("cpu", None),
    ],
)
def test_the_device_by_its_name(name: str, teraflops: float | None) -> None:
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)
