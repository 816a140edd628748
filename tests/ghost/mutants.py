"""Mutants of the product: one wait or one reference that keeps memory is removed, and the race detector must see it."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A line of a function, and what takes its place.

    Attributes:
        name: name of the test.
        module: module of the function.
        function: its name, with the class of a method.
        line: text in its source, which must be there once.
        instead: text in its place.
        case: name of the training that needs the line.
    """

    name: str
    module: str
    function: str
    line: str
    instead: str = "pass"
    case: str = "memo and pages"

    def install(self) -> None:
        """Replace the function in this process, in every module that has imported it."""
        module = importlib.import_module(self.module)
        *owners, name = self.function.split(".")
        owner = getattr(module, owners[0]) if owners else module
        original = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.line) == 1, f"{self.function} has no line {self.line!r}"
        made: dict[str, object] = {}
        exec(compile(source.replace(self.line, self.instead), f"<mutant {self.name}>", "exec"), vars(module), made)
        setattr(owner, name, made[name])
        if not owners:
            for other in list(sys.modules.values()):
                if getattr(other, name, None) is original:
                    setattr(other, name, made[name])


LINK = "bytescale_ext.activation.link"
ON_COMPUTING = "wait_stream(torch.cuda.current_stream())"
MUTANTS = (
    Mutant("computing does not wait for copies", LINK, "CudaLink.wait", "compute.wait_event(ticket)"),
    Mutant("writes do not wait for computing", LINK, "CudaLink.write", f"self.to_host.{ON_COMPUTING}"),
    Mutant("reads do not wait for computing", LINK, "CudaLink.read", f"self.to_device.{ON_COMPUTING}"),
    Mutant("reads do not wait for writes", LINK, "CudaLink.read", "self.to_device.wait_event(written)",
           case="memo in pipelines"),
    Mutant("sources are not held", LINK, "CudaLink.write", "self._held.append((done, held))"),
    Mutant("gradients leave in the order of their hooks", "bytescale_ext.states.gradients", "GradientSums._computing",
           "return torch.cuda.stream(self._compute)", "return contextlib.nullcontext()",
           case="gradients in host memory"),
    Mutant("the host does not wait for copies", LINK, "wait_on_host", "ticket.synchronize()"),
)  # fmt: skip
