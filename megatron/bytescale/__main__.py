"""``python -m megatron.bytescale``: print the patch table against the installed Megatron."""

from __future__ import annotations

import sys

from megatron.bytescale import cpu, status

if __name__ == "__main__":
    cpu.install_if_wanted(sys.argv)
    print("\n".join(status()))
