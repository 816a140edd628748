"""Settings of model states in pages."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.plan.activation.policies import in_gigabytes


@dataclass(frozen=True)
class StateConfig:
    """Adam's states in pages of host memory.

    Attributes:
        page_bytes: of a page.
        host_bytes: the most host memory that the pages of a process may take.
    """

    page_bytes: int
    host_bytes: float

    def check_fits(self, needed: float) -> None:
        """Raise ValueError where the pages of a process need more host memory, naming how much."""
        if needed > self.host_bytes:
            raise ValueError(
                f"model states of each process take {in_gigabytes(needed)} GB of host memory in pages of "
                f"{self.page_bytes:,} bytes, and there are {self.host_bytes / 1e9:.4g} GB: raise --state-host-gb to at "
                "least that, use more stages or tensor-parallel ranks, or share states by --use-distributed-optimizer"
            )
