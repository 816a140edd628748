"""Check, start or join Ray. Only this module imports Ray, which is an optional package."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from bytescale_ext.config.remote import RemoteConfig

_CONNECT_SECONDS = 5.0
_OBJECT_STORE_BYTES = 256 << 20
_START_ATTEMPTS = 3  # Ray gives its processes 30 s to start, which a busy machine may exceed
_NOT_INSTALLED = "--hdp-loader ray: Ray is not installed: pip install '.[ray]', or use --hdp-loader local"


def ray_module() -> ModuleType:
    """Return the module ``ray``. Raises ValueError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(_NOT_INSTALLED) from error
    return ray


def check_remote(config: RemoteConfig) -> None:
    """Check, on every rank at start, that Ray is installed and answers at its address. Raises ValueError."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(_NOT_INSTALLED)
    if config.address is None:
        return
    host, _, port = config.address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--hdp-ray-address {config.address}: give HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--hdp-ray-address {config.address}: nothing answers there ({error}): start Ray with `ray start --head`, "
            "or leave the flag out to have it started on this machine"
        ) from error


def stay_on_loopback() -> None:
    """Keep a Ray of this machine off its networks, by Ray's own switch, which is the default on macOS and Windows.

    Each process that starts or joins that Ray calls this before it imports the module.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def start_ray(address: str | None, namespace: str) -> str:
    """Join the Ray at ``address``, or start one here that ends with this process. Returns its address.

    One that is started here listens on the loopback interface alone, with Ray's token authentication.
    """
    if address is None:
        stay_on_loopback()
    ray = ray_module()
    # Actors import this package from where this process did.
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    options: dict[str, object] = {
        "namespace": namespace,
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}},
        "log_to_driver": False,
        "configure_logging": False,
    }
    if address is None:
        address = "local"
        options |= {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False}
        options |= {"object_store_memory": _OBJECT_STORE_BYTES}
    with sigterm_kept():
        for attempts_left in reversed(range(_START_ATTEMPTS if address == "local" else 1)):
            try:
                context = ray.init(address=address, **options)
                break
            except Exception as error:  # Ray documents no types for these
                ray.shutdown()
                if not attempts_left:
                    raise _no_ray(address, error) from error
    return str(context.address_info["address"])


def _no_ray(address: str, error: Exception) -> ValueError:
    """Return the error for a Ray that cannot be started ("local") or joined."""
    said = " ".join(f"{error} {error.__cause__ or ''}".split())
    if address == "local":
        return ValueError(f"--hdp-loader ray: Ray cannot be started on this machine: {said}")
    return ValueError(
        f"--hdp-ray-address {address}: cannot join ({said}): every machine of the run must be part of that cluster "
        f"(`ray start --address {address}`), with this version of Ray and the same RAY_AUTH_MODE"
    )


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM that Ray replaces: ``--exit-signal-handler`` and the launcher rely on it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
