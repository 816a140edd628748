"""Settings of remote loading (ByteScale section 7)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteConfig:
    """Remote loading (ByteScale section 7): JSONL text, read and tokenized by Ray actors.

    Attributes:
        address: host:port of a Ray cluster, or None to start Ray on this machine.
        num_servers: number of actors that read and tokenize.
        server_tokens: largest number of tokens in the cache of an actor.
        json_key: key of the text in each line.
    """

    address: str | None = None
    num_servers: int = 2
    server_tokens: int = 16_777_216
    json_key: str = "text"

    def __post_init__(self) -> None:
        if self.num_servers < 1:
            raise ValueError(f"--hdp-ray-servers must be at least 1, got {self.num_servers}")
