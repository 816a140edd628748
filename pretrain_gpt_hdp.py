"""Pretrain a GPT with Megatron on documents of any length: parse, configure, install, train.

Takes Megatron's own flags and ours (``--help``). Without ``--hybrid-data-parallel`` Megatron runs untouched.

    torchrun --nproc-per-node 4 pretrain_gpt_hdp.py --hybrid-data-parallel --hdp-tokens-per-rank 8192 ...
"""

from __future__ import annotations

import os
import sys

from megatron.bytescale import check_megatron_version, cpu, install


def main() -> None:
    """Train as the command line says. Bad input ends with one line and exit code 2."""
    try:
        check_megatron_version()
        stand_ins = cpu.install_if_wanted(sys.argv)  # before Megatron is imported

        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

        from megatron.bytescale.training import activation_plans, activations, arguments, hdp, seq1f1b, slices, stock

        args, config = arguments.parse(sys.argv, on_cpu=stand_ins is not None)
        policy = activations.activation_config(args, config)
        if config is not None:
            hdp.check_data(args)
            runtime = hdp.create_runtime(args, config, policy.offload if policy is not None else None)
            install(runtime)
            model = hdp.model_config(args, runtime)
            provider, forward_step = hdp.dataset_provider(runtime), hdp.forward_step(runtime)
        elif seq1f1b.is_on(args):
            slice_runtime = slices.create_runtime(args)
            install(slice_runtime, seq1f1b.FEATURE)
            model = slices.model_config(args, slice_runtime)
            provider, forward_step = stock.dataset_provider, slices.forward_step(slice_runtime)
        else:
            with arguments.refusals_of_megatron():
                model = gpt_config_from_args(args)
            install(None)
            provider, forward_step = stock.dataset_provider, stock.forward_step
        forward_step = activation_plans.apply(
            args, policy, model, forward_step, runtime if config is not None else None
        )
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"pretrain_gpt_hdp.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    if stand_ins is not None and args.rank == 0:
        print("> bytescale: training on CPU with gloo; calls to CUDA are stood in for (megatron/bytescale/cpu.py)")
    pretrain(pretrain_cfg_container_from_args(args, model), provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
