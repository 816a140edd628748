"""Chat templates of strangers end in bounded time and memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time

import pytest

from bytescale_ext.data.samples import template_limits
from bytescale_ext.data.samples.template_limits import (
    CallError,
    LimitedFunction,
    LimitExceededError,
    check_template,
    within_limits,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a' * 4000000000 }}", "memory"),
        ("{{ 'a'|center(4000000000) }}", "memory"),
        ("{{ '%4000000000d' % 1 }}", "memory"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
         "{% endfor %}", "takes longer"),
    ],
)  # fmt: skip
def test_templates_have_limits(template: str, text: str) -> None:
    sandbox = pytest.importorskip("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment()

    def render() -> str:
        return environment.from_string(template).render()  # constants are calculated when a template is compiled

    with pytest.raises(ValueError, match=text):
        within_limits(render, 1.0, 1 << 28)


def test_limits_end_with_the_call() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert within_limits(lambda: 3, 0.05) == 3
    time.sleep(0.1)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with pytest.raises(KeyError):
        within_limits(lambda: {}["x"])


def test_powers_are_refused() -> None:
    for template in ("{{ 9 ** 9 ** 9 }}", "{% set x = 2**n %}", {"default": "{{ 2 ** 3 }}"}):
        with pytest.raises(ValueError, match=r"power \(\*\*\)"):
            check_template(template)
    check_template("**bold** {{ x }} ** {% if y %}**{% endif %}")
    check_template("{{ '**bold**' + x }}{% set y = f(**z) %}{# 2 ** 3 #}")


NESTED = (
    "{% set ns = namespace(a=[0], b=[0]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)


def rendered(template: str) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment().from_string(template).render()


def test_an_alarm_that_comes_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(seconds: float) -> LimitExceededError:
        signal.raise_signal(signal.SIGALRM)
        return LimitExceededError("too slow")

    monkeypatch.setattr(template_limits, "_too_slow", late)
    with pytest.raises(LimitExceededError, match="too slow"):
        within_limits(lambda: signal.raise_signal(signal.SIGALRM), 60.0)


@pytest.mark.slow
def test_alarms_that_an_error_handler_catches_come_again() -> None:
    def call() -> int:
        count = 0
        while count < 2:
            try:
                while True:
                    pass
            except TimeoutError:
                count += 1
        raise KeyError

    with pytest.raises(LimitExceededError, match="takes longer than 0"):
        within_limits(call, 0.01)


@pytest.mark.full
@pytest.mark.slow
def test_operations_that_nothing_interrupts_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(template_limits, "_GRACE", 0.5)
    render = LimitedFunction(rendered, 0.5)
    assert render("{{ 1 + 1 }}") == "2"
    for hostile in ("{{ ns.a == ns.b }}", "{{ ns.a | tojson }}"):
        with pytest.raises(ValueError, match=r"takes longer than 0\.5 s"):
            render(NESTED + hostile)
        assert render("{{ 2 + 2 }}") == "4"
    with pytest.raises(ValueError, match="memory"):
        LimitedFunction(rendered, 20.0, 1 << 28)("{{ 'a' * 4000000000 }}")
    with pytest.raises(CallError, match="unknown tag 'x'"):
        render("{% x %}")


@pytest.mark.slow
def test_a_process_ends_with_its_parent() -> None:
    """The parent may be killed, so that nothing ends its process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=template_limits._serve, args=(here, there, rendered, 20.0, 1 << 30))
    process.start()
    there.close()
    here.close()
    process.join(60.0)
    assert process.exitcode == 0


def test_a_limited_function_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Python writes about errors that nothing can catch to its own stream, or to the process's."""

    def written(text: str) -> str:
        sys.stderr.write(text)
        sys.stderr.flush()
        os.write(2, text.encode())
        return text

    assert LimitedFunction(written, 20.0)("text") == "text"
    assert capfd.readouterr() == ("", "")
