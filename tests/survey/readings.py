"""What a command line makes of a small model, as numbers, without data and without Megatron's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Sequence
from typing import Any

from tests.bytescale.arguments.felt import VOCAB, configurations_of, loss_and_gradient
from tests.harness import run_ranks
from tests.survey.lines import LINES, Line
from tests.survey.rows import Row

UPDATES, STEPS = 3, 12
"""Updates of the weights, and steps of the schedule of learning rate and weight decay."""

Readings = dict[str, str] | str
"""Text of each reading by its name, or the line that refuses the command line.

weights: norm of the weights as Megatron initializes them.
loss: loss and gradient norm, from weights drawn by name.
update: norm of the weights after ``UPDATES`` updates.
schedule: learning rate and weight decay of each parameter group in each step.
run: configuration of the run; features build from it.
config: settings in Megatron's configurations of the training.
"""


def read_rows(rows: Sequence[Row]) -> dict[tuple[str, ...], Readings]:
    """Return the readings of the lines of all rows, with and without the words of the row; all in one process."""
    keys = dict.fromkeys(key for row in rows for key in (key_of(row), key_of(row, with_words=False)))
    found: list[Readings] = run_ranks(_read_all, 1, list(keys), timeout=3000)[0]
    return dict(zip(keys, found, strict=True))


def key_of(row: Row, with_words: bool = True) -> tuple[str, ...]:
    """Return the name of a row's line, and the words that are added to it."""
    return (row.line, *row.added, *(row.words if with_words else ()))


def _read_all(rank: int, world: int, keys: Sequence[tuple[str, ...]]) -> list[Readings]:
    from megatron.core import parallel_state
    from megatron.training.models.gpt import GPTModelBuilder

    from tests.e2e.oracle import draw_weights_by_name

    logging.disable(logging.ERROR)
    parallel_state.initialize_model_parallel()
    initial: list[str] = []
    build_model = GPTModelBuilder.build_model

    def build_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = build_model(self, *args, **kwargs)
        initial[:] = [_norm(model)]
        return model

    GPTModelBuilder.build_model = build_and_note
    draw_weights_by_name()
    return [_try(LINES[name], words, initial) for name, *words in keys]


def _try(line: Line, words: Sequence[str], initial: list[str]) -> Readings:
    from tests.bytescale.arguments.resolving import checked

    try:
        with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(printed):
            return _read(checked(line.num_processes, [*line.words, *words], VOCAB), line.has_model, initial)
    except ValueError as error:
        return str(error)
    except SystemExit:
        return f"argparse: {printed.getvalue()}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"


def _read(args: Any, has_model: bool, initial: list[str]) -> Readings:
    from megatron.training.initialize import _set_random_seed

    from megatron.bytescale.arguments.resolve import resolve

    if not has_model:
        run, configurations = resolve(args), configurations_of(args)
        return {"run": repr(run), "config": _settings(configurations)}
    _set_random_seed(args.seed, args.data_parallel_random_init, args.te_rng_tracker, args.inference_rng_tracker)
    configurations, run, model, loss = loss_and_gradient(args)
    readings = {"weights": initial[0], "loss": repr(loss), "run": repr(run), "config": _settings(configurations)}
    optimizer, scheduler = _optimizer_of(model)
    rates = []
    for step in range(STEPS):
        rates.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])
        if step < UPDATES:
            optimizer.step()
        scheduler.step(args.global_batch_size)
    return {**readings, "update": _norm(model), "schedule": repr(rates)}


def _norm(model: Any) -> str:
    return repr(sum(float(parameter.detach().double().norm()) for parameter in model.parameters()))


def _optimizer_of(model: Any) -> tuple[Any, Any]:
    """Return Megatron's optimizer and scheduler of a model, whose gradients become main gradients."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training import get_args
    from megatron.training.training import get_megatron_optimizer_config, get_optimizer_param_scheduler

    model.ddp_config = DistributedDataParallelConfig()
    for parameter in model.parameters():
        parameter.main_grad = None if parameter.grad is None else parameter.grad.clone()
    config, overrides = get_megatron_optimizer_config(get_args())
    optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)
    return optimizer, get_optimizer_param_scheduler(optimizer)


def _settings(configurations: Sequence[Any]) -> str:
    """Return the values of all fields of configurations, by class and field; functions by name."""
    return repr({
        f"{type(part).__name__}.{field.name}": _text(getattr(part, field.name))
        for part in configurations
        for field in dataclasses.fields(part)
    })  # fmt: skip


def _text(value: object) -> str:
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
