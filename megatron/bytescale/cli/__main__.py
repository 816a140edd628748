"""``python -m megatron.bytescale.cli``: the console command where the package's scripts are not installed."""

from __future__ import annotations

import sys

from megatron.bytescale.cli import main

if __name__ == "__main__":
    sys.exit(main())
