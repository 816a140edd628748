"""Check, start or join Ray. Ray is an optional package, which only this module imports."""

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
_LAST_PORT = 2**16 - 1
_OBJECT_STORE_BYTES = 256 << 20
_START_ATTEMPTS = 3  # Ray's processes must start within 30 s, which a busy machine may exceed
_NOT_INSTALLED = "--hdp-loader ray: Ray is not installed: pip install '.[ray]', or use --hdp-loader local"


def ray_module() -> ModuleType:
    """Return the module ``ray``. Raises ValueError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(_NOT_INSTALLED) from error
    return ray


def check_remote(config: RemoteConfig) -> None:
    """Raise ValueError unless Ray is installed and reachable at its address. Every rank calls this at the start."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(_NOT_INSTALLED)
    if config.address is not None:
        check_address("--hdp-ray-address", config.address)


def check_address(flag: str, address: str) -> None:
    """Raise ValueError unless a server listens at the address of a flag. Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    is_port = port.isdecimal() and len(port) <= len(str(_LAST_PORT)) and int(port) <= _LAST_PORT
    if not host or not is_port:  # the resolver takes a larger port modulo 2^16
        raise ValueError(f"{flag} {address}: give HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{flag} {address}: cannot connect ({error}): start Ray with `ray start --head`, or omit "
            "the flag to start Ray on this machine"
        ) from error


def stay_on_loopback() -> None:
    """Restrict Ray to the loopback interface, by a switch of Ray that is the default on macOS and Windows.

    Each process that starts or joins such a Ray must call this before it imports ``ray``.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def start_ray(address: str | None, namespace: str) -> str:
    """Join the Ray at ``address``, or start Ray on this machine until this process ends. Returns the address.

    A Ray that is started here listens only on the loopback interface, with Ray's token authentication. Raises
    ValueError if Ray cannot be started or joined.
    """
    if address is None:
        stay_on_loopback()
    ray = ray_module()
    # Actors import this package from the same path as this process.
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    options: dict[str, object] = {
        "namespace": namespace,
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}},
        "log_to_driver": False,
        "configure_logging": False,
        "job_config": without_folders(),
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
            except Exception as error:  # Ray does not document the types of these errors
                ray.shutdown()
                if not attempts_left:
                    raise _no_ray(address, error) from error
    return str(context.address_info["address"])


def _no_ray(address: str, error: Exception) -> ValueError:
    """Return the error for a Ray that cannot be started ("local") or joined."""
    reason = " ".join(f"{error} {error.__cause__ or ''}".split())
    if address == "local":
        return ValueError(f"--hdp-loader ray: Ray cannot be started on this machine: {reason}")
    return ValueError(
        f"--hdp-ray-address {address}: cannot join ({reason}): every machine of the run must be part of that cluster "
        f"(`ray start --address {address}`), with this version of Ray and the same RAY_AUTH_MODE"
    )


def without_folders() -> object:
    """Return a configuration with which Ray's workers do not import modules of the current folder."""
    from ray.job_config import JobConfig

    class WithoutFolders(JobConfig):
        """A job whose workers get no folders of the driver: Ray takes it for one with packed code of its own."""

        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return WithoutFolders()


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces, because ``--exit-signal-handler`` and the launcher need it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
