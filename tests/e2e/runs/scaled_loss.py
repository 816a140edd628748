"""Example of a feature in one file, which multiplies the loss."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import chosen
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature


@dataclass(frozen=True)
class ScaledLoss:
    """Configuration with a factor of the loss."""

    scaled_loss: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    parser.add_argument_group("scaled loss").add_argument("--scaled-loss", type=float, metavar="F", help="Multiply.")


def resolve(options: ScaledLoss, run: RunConfig) -> ScaledLoss:
    """Return the factor. Raises ValueError unless it is positive."""
    if options.scaled_loss <= 0:
        raise ValueError(f"--scaled-loss {options.scaled_loss:g} must be positive")
    return options


def build(training: Any, runtime: Any) -> Any:
    """Wrap the forward step of any other feature."""
    factor = runtime.run.get(ScaledLoss).scaled_loss

    def wrap(forward_step: Callable[..., Any]) -> Callable[..., Any]:
        def forward(data_iterator: Any, model: Any) -> Any:
            output, loss_of = forward_step(data_iterator, model)

            def scaled(losses: Any) -> Any:
                total, num_labels, report = loss_of(losses)
                report["lm loss"][0] *= factor
                return total * factor, num_labels, report

            return output, scaled

        return forward

    return training.wrap_forward_step(wrap)


SCALED_LOSS = Feature(
    name="scaled_loss",
    flag="--scaled-loss",
    summary="the loss times a factor",
    add_arguments=add_arguments,
    is_on=chosen("scaled_loss"),
    options=ScaledLoss,
    resolve=resolve,
    build=build,
    refusals=(refuse("--qk-clip", "scaled_loss", "leave one out"),),
)
