"""Ghost libraries, built with the system's compiler: CUDA, NCCL and cuBLAS on the CPU, under torch's own CUDA wheel.

    .venv/bin/python -m tests.ghost.build        # prints the folder of the libraries

Each library has one file of C in ``lib/``, compiled against the headers of the installed ``nvidia-*`` wheels. Functions
that NVIDIA's library exports and the file does not define become stubs, which print their name and return an error.
The folder is ``build/ghost/HASH``; the hash covers the sources, the compiler and the versions of the wheels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent / "lib"
COMPILER = "cc"
FLAGS = ("-O1", "-fPIC", "-shared", f"-I{SOURCES}", f"-I{SOURCES / 'include'}")
WHEELS = ("torch", "nvidia-cuda-runtime", "nvidia-nccl-cu13", "nvidia-cublas")


class Unavailable(Exception):
    """This machine cannot build the ghost libraries; the text names what is missing."""


@dataclass(frozen=True)
class Library:
    """A library of NVIDIA, and the C file that replaces it.

    Attributes:
        soname: name under which torch asks for the library.
        source: file in ``lib/``.
        real: path below the folder of the ``nvidia`` wheels, or None for libraries of the driver, which no wheel has.
        prefix: pattern of the names of its functions.
        error: value that stubs return.
        is_versioned: whether its symbols carry the soname as their version.
    """

    soname: str
    source: str
    real: str | None
    prefix: str
    error: int
    is_versioned: bool = True


LIBRARIES = (  # in the order of linking and loading
    Library("libcudart.so.13", "ghost_cudart.c", "cu13/lib/libcudart.so.13", "(__)?cuda", 801),  # cudaErrorNotSupported
    Library("libcublasLt.so.13", "ghost_cublaslt.c", "cu13/lib/libcublasLt.so.13", "cublasLt", 15),  # NOT_SUPPORTED
    Library("libcublas.so.13", "ghost_cublas.c", "cu13/lib/libcublas.so.13", "cublas", 15),
    Library("libnccl.so.2", "ghost_nccl.c", "nccl/lib/libnccl.so.2", "p?nccl", 5, False),  # ncclInvalidUsage
    Library("libcuda.so.1", "ghost_cuda.c", None, "cu", 801, False),  # CUDA_ERROR_NOT_SUPPORTED
    Library("libnvidia-ml.so.1", "ghost_nvml.c", None, "nvml", 3, False),  # NVML_ERROR_NOT_SUPPORTED
)


def libraries() -> list[Path]:
    """Return the paths of the built libraries in the order of loading.

    Raises:
        Unavailable: no compiler, or torch's wheel is not built for CUDA 13.
    """
    return [folder() / library.soname for library in LIBRARIES]


@functools.cache
def folder() -> Path:
    """Return the folder of the libraries, which is built first if no run has built it.

    Raises:
        Unavailable: no compiler, or torch's wheel is not built for CUDA 13.
    """
    nvidia = _nvidia_folder()
    target = ROOT / "build" / "ghost" / _hash()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as room:
            for library in LIBRARIES:
                _build(library, Path(room), nvidia)
            try:
                shutil.copytree(room, f"{room}.done")
                os.rename(f"{room}.done", target)
            except OSError:  # another process was faster
                shutil.rmtree(f"{room}.done", ignore_errors=True)
    return target


def _nvidia_folder() -> Path:
    for tool in (COMPILER, "nm"):
        if shutil.which(tool) is None:
            raise Unavailable(f"`{tool}` is not installed")
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    if not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("torch is not built for CUDA")
    nvidia = Path(torch.origin).parents[1] / "nvidia"
    for library in LIBRARIES:
        if library.real and not (nvidia / library.real).exists():
            raise Unavailable(f"torch's CUDA is not version 13: nvidia/{library.real} is missing")
    return nvidia


def _hash() -> str:
    found = hashlib.sha256()
    for file in sorted([Path(__file__), *SOURCES.rglob("*.[ch]")]):
        found.update(file.read_bytes())
    for wheel in WHEELS:
        found.update(importlib.metadata.version(wheel).encode())
    found.update(subprocess.run([COMPILER, "--version"], check=True, capture_output=True).stdout)
    return found.hexdigest()[:16]


def _build(library: Library, room: Path, nvidia: Path) -> None:
    """Compile a library twice: alone, to see what it defines, then with stubs for all other functions."""
    includes = [f"-I{nvidia / 'nccl/include'}", f"-I{nvidia / 'cu13/include'}"]
    source, stubs, symbols = SOURCES / library.source, room / "stubs.c", room / "symbols.map"
    built = room / library.soname
    others = [f"-l:{LIBRARIES[0].soname}"] if library is not LIBRARIES[0] else []
    command = [COMPILER, *FLAGS, *includes, str(source), "-o", str(built), f"-Wl,-soname,{library.soname}", f"-L{room}"]
    links = [*others, "-lpthread", "-lrt", "-ldl"]
    subprocess.run([*command, *links], check=True)
    missing = sorted(_wanted(library, nvidia) - _defined(built))
    stubs.write_text(
        "#include <stdio.h>\n"
        "#define STUB(name) int name(void) { \\\n"
        f'  fprintf(stderr, "ghost: " #name " is not played\\n"); return {library.error}; }}\n'
        + "".join(f"STUB({name})\n" for name in missing)
    )
    version: list[str] = []
    if library.is_versioned:
        symbols.write_text(f"{library.soname} {{ global: *; }};\n")
        version = [f"-Wl,--version-script={symbols}"]
    subprocess.run([*command, str(stubs), *version, *links], check=True)
    stubs.unlink()
    symbols.unlink(missing_ok=True)


def _wanted(library: Library, nvidia: Path) -> set[str]:
    """Return the functions of NVIDIA's library; for the driver, the functions that its header declares."""
    if library.real is not None:
        names = _defined(nvidia / library.real)
    else:
        header = (nvidia / "cu13/include/cuda.h").read_text(encoding="utf-8")
        renamed = dict(re.findall(r"#define (cu\w+)\s+(cu\w+)$", header, re.MULTILINE))
        names = {renamed.get(name, name) for name in re.findall(r"CUresult CUDAAPI (cu\w+)\(", header)}
    return {name for name in names if re.fullmatch(f"{library.prefix}\\w+", name)}


def _defined(file: Path) -> set[str]:
    """Return the names that a library exports, without versions."""
    run = subprocess.run(["nm", "-D", "--defined-only", file], check=True, capture_output=True, text=True)
    return {line.split()[-1].split("@")[0] for line in run.stdout.splitlines()}


if __name__ == "__main__":
    print(folder())
