"""Pickles that run code or ask for memory are refused before anything in them is imported or called."""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bytescale_ext.pickles import ALLOWED, FileSlice, UntrustedClass, check_archive, check_pickle

GOOD = (
    {"a": [1, 2.5, None, True, b"x", (1, "two")], "deep": {"er": {1, 2}}},
    Namespace(path=Path("x"), dtype=torch.bfloat16, shape=torch.Size((1, 2)), map=OrderedDict(a=1)),
    [np.arange(3), np.float32(2), np.random.default_rng(0).bit_generator.state["state"]],
)


class Payload:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4])  # torch writes 2 and 4
@pytest.mark.parametrize("value", GOOD)
def test_values_of_checkpoints_pass(value: object, protocol: int) -> None:
    check_pickle(pickle.dumps(value, protocol))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_function_that_is_not_allowed_is_named_and_not_called(tmp_path: Path, protocol: int) -> None:
    import os

    data = pickle.dumps({"args": [Payload(os.mkdir, str(tmp_path / "made"))]}, protocol)
    with pytest.raises(UntrustedClass, match=r"^posix\.mkdir$"):
        check_pickle(data)
    assert not (tmp_path / "made").exists()


def copies(*functions: str) -> bytes:
    """Return a pickle that copies 1 MB of its bytes 1,000 times by calls of these functions, one on the other."""
    calls = b"".join(b"cbuiltins\n%b\n" % name.encode() for name in reversed(functions))
    data = b"B" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    return b"\x80\x04" + data + b"\x94(" + (calls + b"h\x00" + b"\x85R" * len(functions)) * 1000 + b"t."


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04N",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",  # bytes of 2^63
        b"\x80\x05\x96" + b"\0" * 5 + b"\x01\0\0.",  # bytearray of 2^40
        b"\x80\x02Nr\xff\xff\xff\xff.",  # a memo that needs 64 GB
        b"Np4000000000\n.",
        b"\x80\x04cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",  # bytearray(2**31 - 1)
        b"\x80\x04cbuiltins\nbytearray\ncbuiltins\nint\nV4000000000\n\x85R\x85R.",  # bytearray(int("4000000000"))
        b"\x80\x04cbuiltins\nbytes\ncbuiltins\nfloat\nV4\n\x85R\x85R.",
        b"\x80\x04ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\nNJ\xff\xff\xff\x7f\x85}tR.",
        b"\x80\x04cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R.",
        b"\x80\x04cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x81.",
        b"\x80\x04ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x04ctorch.storage\nUntypedStorage\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x04cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\nVV2000000000\n\x85R\x85R.",
        copies("bytearray"),
        copies("list"),
        copies("list", "list"),
        pickle.dumps({number * (2**61 - 1): 0 for number in range(1, 1000)}),
        pickle.dumps({number << 64 for number in range(1, 1000)}),
        b"\x80\x04cargparse\nNamespace\n}\x8c\x01xNsb.",  # changes the class
        b"\x80\x04\x82\x01.",  # the registry of extensions
        b"\x80\x04)q\x00" + b"h\x00h\x00\x86q\x000" * 60 + b"}h\x00Ns.",  # hashed for ever
        b"c_codecs\nencode\n(VAA==\nVbase64\ntR.",
        b"N)R.",  # calls None
        b"))R.",
        b"s.",
        b"(" * 100_000,
    ],
)  # fmt: skip
def test_damaged_and_greedy_pickles(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^damaged"):
        check_pickle(data)


def archive(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def check(tmp_path: Path, data: bytes, offset: int = 0) -> None:
    path = tmp_path / "archive"
    path.write_bytes(b"-" * offset + data + b"-" * offset)
    with path.open("rb") as file:
        check_archive(FileSlice(file, offset, len(data)))


@pytest.mark.parametrize("offset", [0, 100])
def test_archives_in_files(tmp_path: Path, offset: int) -> None:
    check(tmp_path, archive({"weight": torch.arange(5), "args": Namespace(x=1)}), offset)
    with pytest.raises(UntrustedClass, match=r"builtins\.eval"):
        check(tmp_path, archive([Payload(eval, "1")]), offset)
    with pytest.raises(ValueError, match="damaged"):
        check(tmp_path, archive([1])[:-30], offset)


def test_archives_of_other_formats(tmp_path: Path) -> None:
    old = io.BytesIO()
    torch.save([Payload(eval, "1")], old, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="older than"):
        check(tmp_path, old.getvalue())
    script = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), script)
    with pytest.raises(ValueError, match=r"TorchScript|compressed"):
        check(tmp_path, script.getvalue())
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"N" * 10_000_000)
    with pytest.raises(ValueError, match="compressed"):
        check(tmp_path, bomb.getvalue())
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps([Payload(eval, "1")], 2))
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("archive/data.pkl", pickle.dumps([1], 2))
    with pytest.raises(ValueError, match="twice"):
        check(tmp_path, twice.getvalue())


def test_allowed_names_are_classes_and_constructors() -> None:
    """A longer list needs a review: no name may import, open files or call anything that is not in the list."""
    assert not any(name.startswith(("os.", "posix.", "subprocess.", "importlib.", "functools.")) for name in ALLOWED)
    assert not ALLOWED & {"builtins.eval", "builtins.exec", "builtins.getattr", "builtins.__import__", "builtins.open",
                          "torch.load", "torch.storage._load_from_bytes", "pickle.loads"}  # fmt: skip
