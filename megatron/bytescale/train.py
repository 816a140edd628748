"""``torchrun -m megatron.bytescale.train``: the same program as pretrain_gpt_hdp.py, for an installed package."""

from __future__ import annotations

from pretrain_gpt_hdp import main

if __name__ == "__main__":
    main()
