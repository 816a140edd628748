"""What holds for every test: it leaves the process as it found it, so that order does not matter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from megatron.bytescale import cpu


def pytest_configure() -> None:
    """Examples are the same in every run, and none has to be ready in time."""
    settings.register_profile("steady", deadline=None, derandomize=True)
    settings.load_profile("steady")


@pytest.fixture(autouse=True)
def leaves_torch_alone() -> Iterator[None]:
    """The stand-ins for CUDA change torch for the whole process; a test that installs them does so in another one."""
    yield
    assert not cpu.installed(), "this test left the stand-ins for torch.cuda in place"
