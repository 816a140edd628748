"""Settings of model states in pages."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.plan.states.tiers import least_host_bytes


@dataclass(frozen=True)
class NvmeConfig:
    """Local disk for the pages that do not fit in host memory.

    Attributes:
        folder: folder of the files; there is one file for each process and part of its optimizer.
        num_bytes: disk space of a process, in bytes.
        rank: rank of the process, which is part of the file names.
        exit_signal: number of the signal on which a run saves a checkpoint and exits.
    """

    folder: Path
    num_bytes: float
    rank: int
    exit_signal: int = signal.SIGTERM


@dataclass(frozen=True)
class StateConfig:
    """Adam's states in pages of host memory, and of a disk.

    Attributes:
        page_bytes: bytes of a page.
        host_bytes: host memory for the pages of a process, in bytes.
        nvme: disk, or None.
        stage: states that leave the device: 1 for Adam's states, 2 also for gradients, 3 also for parameters of layers.
        window_layers: number of layers with parameters on the device at a time, in stage 3.
        update_steps: number of steps that overlap with an update; 0 means that each step waits for its update.
        shares_node: whether the processes of a node share gradients and parameters in host memory.
        note: log lines about the choice of these settings; empty if the user gave them.
    """

    page_bytes: int
    host_bytes: float
    nvme: NvmeConfig | None = None
    stage: int = 1
    window_layers: int = 2
    update_steps: int = 0
    shares_node: bool = False
    note: str = ""

    def check_fits(self, host_bytes: float, file_bytes: float = 0.0) -> None:
        """Raise ValueError, which names the need, if the pages of a process exceed its host memory or disk space."""
        if host_bytes > self.host_bytes:
            other = "" if self.nvme else ", give a local disk by --state-nvme"
            raise ValueError(
                f"model states of each process take {in_gigabytes(host_bytes)} GB of host memory in pages of "
                f"{self.page_bytes:,} bytes, but there are {self.host_bytes / 1e9:.4g} GB: raise --state-host-gb to at "
                f"least that{other}, use more stages or tensor-parallel ranks, or share states by "
                "--use-distributed-optimizer"
            )
        if self.nvme is not None and file_bytes > self.nvme.num_bytes:
            raise ValueError(
                f"pages of each process take {in_gigabytes(file_bytes)} GB of {self.nvme.folder} in two versions, but "
                f"there are {self.nvme.num_bytes / 1e9:.4g} GB: raise --state-nvme-gb to at least that, give a larger "
                "disk, use more stages or tensor-parallel ranks, or share states by --use-distributed-optimizer"
            )

    def share(self, part: float, has_copies: bool) -> StateConfig:
        """Return the budget of a part of the states, 0 to 1.

        Without a disk, each part may take the memory that earlier parts have left, so the whole budget is returned.
        """
        if self.nvme is None:
            return self
        return replace(self, host_bytes=max(part * self.host_bytes, least_host_bytes(self.page_bytes, has_copies)))

    def without(self, host_bytes: float, file_bytes: float) -> StateConfig:
        """Return the remaining budget after some pages have taken this host memory and disk space, in bytes."""
        nvme = self.nvme and replace(self.nvme, num_bytes=self.nvme.num_bytes - file_bytes)
        return replace(self, host_bytes=self.host_bytes - host_bytes, nvme=nvme)


@dataclass(frozen=True)
class ResidentStates:
    """Model states that stay on the device, as in Megatron, because this was the best choice.

    Attributes:
        note: log lines about the choice.
    """

    note: str
