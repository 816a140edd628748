"""Load checkpoints in plain Megatron: python stock_load.py TORCH TORCH_DIST, folders of one iteration each.

Both are checkpoints of the same training. Prints the largest difference of their parameters.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder


def build(args: Any) -> torch.nn.Module:
    """Return Megatron's model of a checkpoint's arguments, with random weights."""
    args.use_cpu_initialization = True  # otherwise random numbers would be drawn on a GPU
    config = gpt_config_from_args(args)
    model: torch.nn.Module = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return model


def main(one_file: Path, sharded: Path) -> None:
    """Load both and compare."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    whole = torch.load(one_file / "mp_rank_00" / "model_optim_rng.pt", weights_only=False, map_location="cpu")
    first, second = build(whole["args"]), build(dist_checkpointing.load_common_state_dict(str(sharded))["args"])
    before = [one.detach().clone() for one in second.parameters()]
    first.load_state_dict(whole["model"], strict=True)
    names = set(second.sharded_state_dict())
    loaded = dist_checkpointing.load(second.sharded_state_dict(), str(sharded))
    second.load_state_dict({name: loaded[name] for name in names}, strict=True)
    assert not all(torch.equal(one, other) for one, other in zip(before, second.parameters(), strict=True))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    print("difference", max(float((one - other).abs().max()) for one, other in pairs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
