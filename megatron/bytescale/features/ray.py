"""Remote loading (ByteScale section 7): Ray actors read and tokenize text while training runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytescale_ext.config.remote import RemoteConfig
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import equals
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


@dataclass(frozen=True)
class RayOptions:
    """Flags of the remote loader.

    Attributes:
        hdp_ray_address: address of a running Ray cluster.
        hdp_ray_servers: number of actors that read and tokenize.
        hdp_json_key: key of the text in each line.
    """

    hdp_ray_address: str | None
    hdp_ray_servers: int | None
    hdp_json_key: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the remote loader."""
    group = parser.add_argument_group("bytescale: remote loading")
    group.add_argument(
        "--hdp-loader",
        choices=["local", "ray"],
        help="local (default): Megatron's .bin and .idx files. ray: --data-path names files of JSON lines, JSON or "
        "Parquet, also packed, whose text Ray actors tokenize while training runs.",
    )
    group.add_argument(
        "--hdp-ray-address",
        metavar="HOST:PORT",
        help="A Ray cluster that includes all machines of the run. Default: start Ray on this machine.",
    )
    group.add_argument(
        "--hdp-ray-servers",
        type=int,
        metavar="N",
        help="Number of actors that read and tokenize (2). Each actor keeps up to 16M tokens.",
    )
    group.add_argument("--hdp-json-key", metavar="KEY", help="Key of the text in each line (text).")


def resolve(options: RayOptions, run: RunConfig) -> RemoteConfig:
    """Return the settings of the actors."""
    default = RemoteConfig()
    return RemoteConfig(
        address=options.hdp_ray_address,
        num_servers=default.num_servers if options.hdp_ray_servers is None else options.hdp_ray_servers,
        json_key=default.json_key if options.hdp_json_key is None else options.hdp_json_key,
    )


def build(training: Training, runtime: Runtime) -> Training:
    """Load steps from Ray actors in place of Megatron's data sets."""
    from megatron.bytescale.features.hdp import build as hdp

    return hdp.load_from_ray(training, runtime)


RAY = Feature(
    name="ray",
    flag="--hdp-loader",
    summary="remote loading: Ray actors tokenize text while training runs",
    add_arguments=add_arguments,
    is_on=equals("hdp_loader", "ray"),
    options=RayOptions,
    resolve=resolve,
    build=build,
    needs="--hdp-loader ray",
    requires=("hdp",),
)
