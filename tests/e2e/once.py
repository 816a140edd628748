"""Results that many tests need, made once in a test session by the first test that needs them, in any worker.

Tests in other workers wait for the result. A failure is not stored: the next test that needs the result tries again.
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
    """Return ``make(folder)``, which is called once for each ``key``.

    Args:
        make: function that fills an empty folder, which exists until the end of the session. Its result is pickled, so
            it must not refer to other folders.
        key: all inputs of the result, which are compared by ``repr``.
    """
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    folder = Path(os.environ[FOLDER])
    of_key = folder / name
    result = of_key / "result.pickle"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or when the process ends
        if not result.exists():
            shutil.rmtree(of_key, ignore_errors=True)
            of_key.mkdir()
            made = pickle.dumps(make(of_key))
            result.write_bytes(made)
        return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]
