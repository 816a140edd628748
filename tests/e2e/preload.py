"""Module that fork servers import once: Megatron, so that ranks of end-to-end tests start quickly.

On CPU it comes with the stand-ins for torch.cuda; on ghost GPUs (tests/ghost) torch.cuda is torch's own.
"""

import argparse
import contextlib
import gc
import importlib
import os
import pkgutil
import queue
from functools import cache, partial

gc.disable()  # until everything is imported

from megatron.bytescale import cpu, registry  # noqa: E402

STAND_INS = None if "GHOST_DEVICES" in os.environ else cpu.install_if_wanted(["--cpu"])

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.training import arguments  # noqa: E402
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

for name in (
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.tokenizers.text.models",
    "megatron.training.models.gpt",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
):
    with contextlib.suppress(ModuleNotFoundError):  # another version of Megatron may lack one
        importlib.import_module(name)

import megatron.bytescale  # noqa: E402
import pretrain_gpt_hdp  # noqa: E402, F401
from megatron.bytescale import patches  # noqa: E402

for found in pkgutil.walk_packages(megatron.bytescale.__path__, "megatron.bytescale."):
    if not found.name.endswith(".__main__"):
        importlib.import_module(found.name)

# Each rank hashes the sources of the patched functions, so they are read and parsed only once.
registry.source_hash = cache(registry.source_hash)
for patch in patches.PATCHES:
    registry.hash_of(patch, registry.resolve_target(patch.target)[2])

# Megatron reads the help of its flags from its own sources for each parse, which takes a fifth of a short run. To make
# its flags takes another tenth.
read_help = cache(partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
ArgumentGroupFactory._get_field_docstrings = staticmethod(read_help)
PREPARED = [add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))]


def add_prepared_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add Megatron's flags to a parser: the first parser of a rank takes the flags that were made here."""
    if not (PREPARED and parser.add_help):
        return add_megatron_arguments(parser)
    own = {name: vars(parser)[name] for name in ("prog", "usage", "description", "epilog", "formatter_class")}
    vars(parser).update(vars(PREPARED.pop()), **own)
    parser.set_defaults(local_rank=int(os.environ.get("LOCAL_RANK", "0")))  # the default that Megatron takes from here
    return parser


arguments.add_megatron_arguments = add_prepared_arguments

# A rank that saves a sharded checkpoint passes the results through a queue in a separate process, which would import
# torch and Megatron again. A local queue works, except for --async-save, which writes in another process.
filesystem_async.get_write_results_queue = cache(lambda mp_mode="spawn": queue.Queue())

# All objects so far live as long as every rank, so the garbage collectors of ranks neither visit nor copy them.
gc.collect()
gc.freeze()
gc.enable()
