"""What the played functions of TransformerEngine share: types of elements, and the checks of a call."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from tests.ghost import hollow


class DType(enum.IntEnum):
    """Types of elements."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH_TYPES: dict[int, torch.dtype] = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
num_calls: dict[str, int] = {}
"""Number of calls of each played function in this process."""


def played(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a played function: it counts the calls, and refuses tensors in host memory.

    On hollow ghost GPUs the function only allocates its results.
    """

    @wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        for one in [*args, *kwargs.values()]:
            check_device(one, function.__name__)
        num_calls[function.__name__] = num_calls.get(function.__name__, 0) + 1
        if hollow.is_hollow() and hollow.are_large(hollow.tensors_of(args)):
            return hollow.room_for(function, torch.device("cuda", torch.cuda.current_device()), args, kwargs)
        return function(*args, **kwargs)

    return check_and_call


def check_device(value: object, name: str) -> None:
    """Raise RuntimeError if a tensor of an argument is not on a GPU."""
    if isinstance(value, torch.Tensor) and not value.is_cuda:
        raise RuntimeError(f"{name} reads a tensor of shape {tuple(value.shape)} in host memory")
    for one in value if isinstance(value, list | tuple) else ():
        check_device(one, name)


def refuse(**given: object) -> None:
    """Raise NotImplementedError for an argument that is given and not played."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is not played")
