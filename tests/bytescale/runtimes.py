"""States of a process without a command line, for tests."""

from __future__ import annotations

from dataclasses import replace

from bytescale_ext.config.run import RunConfig
from megatron.bytescale.runtime import Runtime
from tests.config.runs import run_of


def runtime_of(*configs: object, run: RunConfig | None = None, log_interval: int = 100, **parts: object) -> Runtime:
    """Return the state of a process with these ``Parts``, of ``run`` or of a small run with these features."""
    run = run_of(*configs) if run is None else run
    runtime = Runtime.of(replace(run, process=replace(run.process, log_interval=log_interval)))
    runtime.add_parts(**parts)
    return runtime
