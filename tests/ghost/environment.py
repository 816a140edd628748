"""Environment of processes on ghost GPUs: torch's CUDA wheel loads the ghost libraries in place of NVIDIA's."""

from __future__ import annotations

from tests.ghost import build

NUM_DEVICES = 8  # of a node


def environment(num_devices: int = NUM_DEVICES) -> dict[str, str]:
    """Return the variables of a process on ghost GPUs; it must be started with them.

    Raises:
        Unavailable: this machine cannot build the libraries.
    """
    return {
        "LD_PRELOAD": ":".join(map(str, build.libraries())),
        "LD_LIBRARY_PATH": str(build.folder()),
        "GHOST_DEVICES": str(num_devices),
        # Compiled functions are kernels of Triton, which need a GPU.
        "TORCH_COMPILE_DISABLE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
