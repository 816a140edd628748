"""Make things that many tests need once in a test session: by the first test that needs them, in any worker.

Tests in other workers that ask meanwhile wait for it. What fails is not kept: the next test that asks tries again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "BYTESCALE_TESTS_ONCE"  # environment variable, set by conftest.py; ranks inherit it


def once[T](make: Callable[[Path], T], *key: Any) -> T:
    """Return ``make(folder)``, made once for ``key``.

    Args:
        make: fills an empty folder that stays for the session; what it returns is pickled, so it names no other folder.
        key: what the result depends on; its ``repr`` counts.
    """
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    folder = Path(os.environ[FOLDER])
    of_key = folder / name
    result = of_key / "result.pickle"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed when the file is closed, also by the end of the process
        if not result.exists():
            shutil.rmtree(of_key, ignore_errors=True)
            of_key.mkdir()
            made = pickle.dumps(make(of_key))
            result.write_bytes(made)
        return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]
