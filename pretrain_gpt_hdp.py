"""Pretrain a GPT with Megatron: parse, resolve, install, build, pretrain.

Takes Megatron's own flags and those of our features (``--help``, `bytescale doctor`). Without a feature Megatron runs
unchanged.

    torchrun --nproc-per-node 4 pretrain_gpt_hdp.py --hybrid-data-parallel --hdp-tokens-per-rank 8192 ...
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from bytescale_ext.terminal import escape_output
from megatron.bytescale import cpu, install
from megatron.bytescale.arguments.bad_input import Refused, one_line_errors, without_import_warnings
from megatron.bytescale.faults import (
    check_watchdog,
    explain_in_one_line,
    is_first_to_say,
    named_faults,
    told_before_the_watchdog,
)
from megatron.bytescale.protection import protect_process
from megatron.bytescale.versions import check_megatron_version

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

PROGRAM = "pretrain_gpt_hdp.py"


def main(adapt: Callable[[Training, Runtime], Training] | None = None) -> None:
    """Train as the command line says. Bad input ends with one line and exit code 2.

    ``adapt``: changes what the features have built, in experiments.
    """
    escape_output()
    sys.excepthook = explain_in_one_line
    protect_process()
    with one_line_errors(PROGRAM):
        check_megatron_version()
        with without_import_warnings():
            on_cpu = cpu.install_if_wanted(sys.argv) is not None  # before Megatron is imported
            from megatron.core.enums import ModelType
            from megatron.training import pretrain

            from megatron.bytescale.arguments.parse import command_line, parse, print_arguments, without_fractions
            from megatron.bytescale.arguments.resolve import resolve
            from megatron.bytescale.build import build
            from megatron.bytescale.runtime import Runtime
            from megatron.bytescale.training.initialize import own_process_groups, stand_alone, use_gpu
            from megatron.bytescale.training.pretrain_arguments import pretrain_config

        if not on_cpu:
            check_watchdog()
        args = parse(sys.argv, on_cpu)
        if not on_cpu:
            use_gpu(args.local_rank)
        runtime = Runtime.of(resolve(args))
        install(runtime)
        training = build(args, runtime)
        if adapt is not None:
            training = adapt(training, runtime)
        config = pretrain_config(args, training.model)
    print_arguments(args)
    stand_alone()
    watch = contextlib.nullcontext() if on_cpu else told_before_the_watchdog(runtime.run.process.timeout_minutes)
    refusals = one_line_errors(PROGRAM, Refused, is_first_to_say)
    with own_process_groups(), refusals, named_faults(), watch, command_line(without_fractions(sys.argv)):
        pretrain(config, training.dataset_provider, ModelType.encoder_or_decoder, training.forward_step)


if __name__ == "__main__":
    main()
