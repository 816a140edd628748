"""Messages of Megatron name flags."""

from __future__ import annotations

import pytest

from megatron.bytescale.arguments.bad_input import refusals_of_megatron
from megatron.bytescale.arguments.megatron_errors import in_flags

MESSAGES = {
    "this must hold: assert args.data_path is None or args.data_args_path is None": (
        "this must hold: --data-path is None or --data-args-path is None"
    ),
    "this must hold: assert not args.bf16": "--bf16 and --fp16 exclude each other: give one",
    "Number of decoder layers 3must match num_layers 4": (
        "--pipeline-model-parallel-layout has 3 decoder layers (t), and --num-layers is 4"
    ),
    "--qk-clip is only supported\n  with TE": "--qk-clip is only supported with TE",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_in_flags(message: str) -> None:
    assert in_flags(message) == MESSAGES[message]


def test_errors_of_megatron_are_named_and_our_own_pass() -> None:
    with pytest.raises(ValueError, match="Megatron refuses these arguments: a b"), refusals_of_megatron():
        raise ValueError("a\nb")
    own = compile("raise ValueError('--a: b')", "/here/megatron/bytescale/x.py", "exec")
    with pytest.raises(ValueError, match=r"^--a: b$"), refusals_of_megatron():
        exec(own)
