"""Finds the classes that a pickle needs, without importing or calling any of them.

A pickle can name any importable function and call it, so unpickling a stranger's file runs the stranger's code. The
scanner runs the opcodes of Python's unpickler with placeholders for everything that is imported, called or built.
``ALLOWED`` lists the names that checkpoints of Megatron 0.19 and torch need; tests compare it with checkpoints of every
feature.
"""

from __future__ import annotations

import _compat_pickle
import errno
import io
import os
import pickle
import zipfile
from collections.abc import Buffer, Callable, Sized
from typing import IO, Any, ClassVar, Final, cast

from bytescale_ext.errors import one_line

_DTYPES: Final = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_STORAGES: Final = "Bool Byte Char Short Int Long Half BFloat16 Float Double ComplexFloat ComplexDouble"
_BY_MODULE: Final = {
    "_codecs": "encode",
    "_io": "BytesIO",
    "argparse": "Namespace",
    "builtins": "bool bytearray bytes complex dict float frozenset int list set slice str tuple",
    "collections": "OrderedDict defaultdict",
    "megatron.core.enums": "ModelType",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.rerun_state_machine": "Call Caller RerunDiagnostic RerunMode RerunState",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType CudaGraphModule CudaGraphScope "
    "InferenceCudaGraphScope LayerType ModelType",
    "numpy": "dtype ndarray",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.dtypes": "UInt32DType",
    "pathlib": "Path PosixPath PurePosixPath",
    "signal": "Signals",
    "torch": f"Size Tensor device {_DTYPES} {' '.join(f'{name}Storage' for name in _STORAGES.split())}",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_parameter _rebuild_tensor _rebuild_tensor_v2",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage",
    "types": "SimpleNamespace",
}
ALLOWED: Final = frozenset(f"{module}.{name}" for module, names in _BY_MODULE.items() for name in names.split())
"""Classes and functions by module and name. They open no file, import no module, and call only each other."""
_SIZED: Final = frozenset(("builtins.bytearray", "builtins.bytes", "torch.Tensor", "torch.nn.parameter.Parameter"))
"""Names that allocate memory if they are called with a number, or with the result of a call, which can be a number."""
_UNCALLED: Final = frozenset(("numpy.ndarray", "torch.storage.TypedStorage", "torch.storage.UntypedStorage")).union(
    f"torch.{name}Storage" for name in _STORAGES.split()
)
"""Classes that checkpoints name and never call: a call allocates any number of bytes."""
_REBUILD: Final = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter")
_SHORT: Final = 64
"""Length of a text or list whose copies are not counted."""
_COPIES: Final = 16
"""Most bytes and items that calls may copy together, as a multiple of the pickle's bytes."""
_ZIP: Final = b"PK\x03\x04"
_DEPTH: Final = 3  # of tuples in keys


class UntrustedClass(ValueError):
    """A pickle needs a class or function that is not allowed. The message is its name."""


class _Name:
    """Placeholder of an imported class or function."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """Placeholder of an object that a class or function made of ``size`` bytes or items."""

    def __init__(self, name: str = "", size: int = 0) -> None:
        self.name = name
        self.size = size


_Step = Callable[[Any], None]


class _Scanner(pickle._Unpickler):
    """The unpickler of Python's library, with placeholders. ``stack``, ``proto`` and ``memo`` belong to the library."""

    stack: list[Any]
    memo: dict[int, Any]
    proto: int
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, encoding: str = "ASCII") -> None:
        """Scan the first pickle in ``data``, whose strings of Python 2 have this encoding."""
        super().__init__(io.BytesIO(data), encoding=encoding)
        self._size = len(data)
        self._copied = 0

    def find_class(self, module: str, name: str) -> _Name:
        if self.proto < 3:  # names of Python 2, as Python's unpickler maps them
            module, name = _compat_pickle.NAME_MAPPING.get(
                (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
            )
        if f"{module}.{name}" not in ALLOWED:
            raise UntrustedClass(f"{module}.{name}")
        return _Name(f"{module}.{name}")

    def persistent_load(self, pid: object) -> _Made:
        return _Made()

    def _call(self, function: object, args: object) -> None:
        """Push the placeholder of a call's result."""
        if not isinstance(function, _Name) or not isinstance(args, tuple):
            raise pickle.UnpicklingError("it calls an object")
        if function.name in _UNCALLED:
            raise pickle.UnpicklingError(f"it calls {function.name}")
        if function.name in _SIZED and any(map(_may_be_number, args)):
            raise pickle.UnpicklingError(f"it calls {function.name} with a number")
        if function.name == "_codecs.encode" and args[1:] != ("latin1",):
            raise pickle.UnpicklingError("it encodes text")
        if function.name.endswith("._reconstruct") and args[1:2] != ((0,),):
            raise pickle.UnpicklingError("it allocates an array")
        if function.name.endswith("multiarray.scalar") and len(args) != 2:  # without bytes it allocates them
            raise pickle.UnpicklingError("it makes a scalar without its bytes")
        if function.name == "torch._tensor._rebuild_from_type_v2" and not _is_rebuild(args[:1]):
            raise pickle.UnpicklingError("it calls a function by another")
        size = sum(map(_size_of, args))
        self._copied += size
        if self._copied > _COPIES * self._size:
            raise pickle.UnpicklingError("it copies its data many times")
        self.stack.append(_Made(function.name, size))

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self._call(function, args)

    def _new_ex(self) -> None:
        values, args, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._call(function, (*args, *values.values()))

    def _instantiate(self, function: object, args: list[object]) -> None:
        self._call(function, tuple(args))

    def _build(self) -> None:
        self.stack.pop()
        if not isinstance(self.stack[-1], _Made):
            raise pickle.UnpicklingError("it changes a class")

    def _append_all(self) -> None:
        items = self.pop_mark()
        if not isinstance(self.stack[-1], _Made):
            self.stack[-1].extend(items)

    def _append(self) -> None:
        item = self.stack.pop()
        if not isinstance(self.stack[-1], _Made):
            self.stack[-1].append(item)

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key in items[::2]:
            _check_key(key)
        if not isinstance(self.stack[-1], _Made):
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _check_key(key)
        if not isinstance(self.stack[-1], _Made):
            self.stack[-1][key] = value

    def _add_items(self) -> None:
        items = self.pop_mark()
        for item in items:
            _check_key(item)
        if not isinstance(self.stack[-1], _Made):
            self.stack[-1].update(items)

    def _frozen_set(self) -> None:
        items = self.pop_mark()
        for item in items:
            _check_key(item)
        self.stack.append(frozenset(items))

    def _dict(self) -> None:
        items = self.pop_mark()
        for key in items[::2]:
            _check_key(key)
        self.stack.append(dict(zip(items[::2], items[1::2], strict=True)))

    def _put(self, index: int) -> None:
        if not 0 <= index <= self._size:  # the unpickler in C allocates a memo of this length
            raise pickle.UnpicklingError(f"it has the memo {index}")
        self.memo[index] = self.stack[-1]

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has an opcode that checkpoints do not need")

    dispatch: ClassVar[dict[int, _Step]] = {
        **pickle._Unpickler.dispatch,
        **{
            opcode[0]: step
            for opcode, step in {
                pickle.REDUCE: _reduce,
                pickle.NEWOBJ: _reduce,
                pickle.NEWOBJ_EX: _new_ex,
                pickle.BUILD: _build,
                pickle.APPEND: _append,
                pickle.APPENDS: _append_all,
                pickle.SETITEM: _set_item,
                pickle.SETITEMS: _set_items,
                pickle.ADDITEMS: _add_items,
                pickle.FROZENSET: _frozen_set,
                pickle.DICT: _dict,
                pickle.PUT: lambda self: self._put(int(self.readline()[:-1])),
                pickle.LONG_BINPUT: lambda self: self._put(int.from_bytes(self.read(4), "little")),
                **dict.fromkeys((pickle.EXT1, pickle.EXT2, pickle.EXT4), _refuse),
                **dict.fromkeys((pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER), _refuse),
            }.items()
        },
    }


def _may_be_number(arg: object) -> bool:
    return isinstance(arg, int) or (isinstance(arg, _Made) and arg.name != "_codecs.encode")


def _is_rebuild(functions: tuple[object, ...]) -> bool:
    return all(isinstance(function, _Name) and function.name in _REBUILD for function in functions)


def _size_of(arg: object) -> int:
    """Return the bytes or items that a call may copy from an argument, 0 for a few."""
    size = arg.size if isinstance(arg, _Made) else len(arg) if isinstance(arg, Sized) else 0
    return size if size > _SHORT else 0


def _check_key(key: object, depth: int = _DEPTH) -> None:
    """Raise UnpicklingError for keys that are slow to hash or to tell apart.

    The time to hash nested tuples grows exponentially with their depth. Integers of more than 64 bits can all have one
    hash, and the time to look them up grows with their number.
    """
    if isinstance(key, int) and key.bit_length() > 64:
        raise pickle.UnpicklingError("it has a key of more than 64 bits")
    if isinstance(key, tuple):
        if not depth or len(key) > 64:
            raise pickle.UnpicklingError("it has deep keys")
        for item in key:
            _check_key(item, depth - 1)


def check_pickle(data: bytes, encoding: str = "ASCII") -> None:
    """Check the classes that the first pickle in ``data`` needs. Nothing is imported or called.

    Raises:
        UntrustedClass: a class or function is not in ``ALLOWED``.
        ValueError: the pickle is damaged, or would allocate memory without limits.
    """
    try:
        _Scanner(data, encoding).load()
    except UntrustedClass:
        raise
    except Exception as error:  # a damaged pickle raises many types
        raise ValueError(f"damaged ({one_line(error, 80) or type(error).__name__})") from None


class FileSlice(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        """Show ``length`` bytes from ``offset``, or fewer if the file ends before."""
        self._file, self._offset, self._position = file, offset, 0
        self._length = max(0, min(length, os.fstat(file.fileno()).st_size - offset))

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in the slice."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the slice, and return it. Raises OSError before the slice."""
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if position < 0:
            raise OSError(errno.EINVAL, "before the start of the file")
        self._position = position
        return position

    def readinto(self, buffer: Buffer) -> int:
        """Read from the position into a buffer; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def check_archive(file: FileSlice) -> None:
    """Check the classes in a file of ``torch.save``. Reads no tensors.

    Raises:
        UntrustedClass: a class or function is not in ``ALLOWED``.
        ValueError: the file is damaged, compressed, or has another format than today's torch writes.
    """
    import torch

    file.seek(0)
    if file.read(4) != _ZIP:  # torch would unpickle a file of another format at once
        raise ValueError("damaged, or older than torch 1.6")
    try:
        with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
            entries = archive.infolist()
            if len({entry.filename for entry in entries}) < len(entries) or archive.comment:
                raise ValueError("damaged (an entry is there twice)")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("compressed")
        file.seek(0)
        reader = torch._C.PyTorchFileReader(cast(IO[bytes], file))  # torch.load reads with it too
        records = reader.get_all_records()
        data = reader.get_record("data.pkl")
    except ValueError:
        raise
    except Exception as error:  # zipfile and torch raise many types
        raise ValueError(f"damaged ({type(error).__name__})") from None
    if "constants.pkl" in records:
        raise UntrustedClass("TorchScript")
    check_pickle(data, "utf-8")
