"""Settings of model states in pages."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.plan.states.tiers import least_host_bytes


@dataclass(frozen=True)
class NvmeConfig:
    """A local disk for the pages that host memory has no room for.

    Attributes:
        folder: of the files, one for each process and part of its optimizer.
        num_bytes: the most space that a process may take.
        rank: of the process, which names its files.
        exit_signal: number of the signal on which a run saves and ends.
    """

    folder: Path
    num_bytes: float
    rank: int
    exit_signal: int = signal.SIGTERM


@dataclass(frozen=True)
class StateConfig:
    """Adam's states in pages of host memory, and of a disk.

    Attributes:
        page_bytes: of a page.
        host_bytes: the most host memory that the pages of a process may take.
        nvme: the disk, or None.
        stage: what leaves the device: 1 Adam's states, 2 gradients too, 3 parameters of layers too.
        window_layers: whose parameters the device holds at a time, in stage 3.
        update_steps: beside how many steps an update runs; 0: none, because each step waits for its own.
        note: log lines about how this was chosen; empty: it was given.
    """

    page_bytes: int
    host_bytes: float
    nvme: NvmeConfig | None = None
    stage: int = 1
    window_layers: int = 2
    update_steps: int = 0
    note: str = ""

    def check_fits(self, host_bytes: float, file_bytes: float = 0.0) -> None:
        """Raise ValueError, naming how much, where the pages of a process need more host memory or disk space."""
        if host_bytes > self.host_bytes:
            other = "" if self.nvme else ", give a local disk by --state-nvme"
            raise ValueError(
                f"model states of each process take {in_gigabytes(host_bytes)} GB of host memory in pages of "
                f"{self.page_bytes:,} bytes, and there are {self.host_bytes / 1e9:.4g} GB: raise --state-host-gb to at "
                f"least that{other}, use more stages or tensor-parallel ranks, or share states by "
                "--use-distributed-optimizer"
            )
        if self.nvme is not None and file_bytes > self.nvme.num_bytes:
            raise ValueError(
                f"pages of each process take {in_gigabytes(file_bytes)} GB of {self.nvme.folder} in two versions, and "
                f"there are {self.nvme.num_bytes / 1e9:.4g} GB: raise --state-nvme-gb to at least that, give a larger "
                "disk, use more stages or tensor-parallel ranks, or share states by --use-distributed-optimizer"
            )

    def share(self, part: float, has_copies: bool) -> StateConfig:
        """Return the budget of a part (0 to 1) of the states. Without a disk, parts are served one after another."""
        if self.nvme is None:
            return self
        return replace(self, host_bytes=max(part * self.host_bytes, least_host_bytes(self.page_bytes, has_copies)))

    def without(self, host_bytes: float, file_bytes: float) -> StateConfig:
        """Return what is left after some pages have taken so much."""
        nvme = self.nvme and replace(self.nvme, num_bytes=self.nvme.num_bytes - file_bytes)
        return replace(self, host_bytes=self.host_bytes - host_bytes, nvme=nvme)


@dataclass(frozen=True)
class ResidentStates:
    """Model states that stay where Megatron keeps them, because that was chosen.

    Attributes:
        note: log lines about how.
    """

    note: str
