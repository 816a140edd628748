"""Pickled values from the process that plans. Large arrays travel as shared memory, which the reader maps.

A plan of half a million documents holds 16 MB of arrays. Read through a pipe, they take the reader's thread 10 ms of
processor time; mapped, nothing before they are used.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
from typing import BinaryIO, Final, cast

SHARED_BYTES: Final = 1 << 18
"""Arrays of fewer bytes together travel in the pipe."""

_ALIGNED = 64  # bytes: an array starts at a multiple


def send(value: object, pipe: BinaryIO, channel: socket.socket) -> None:
    """Write a value to a pipe, and the descriptor of the memory of its large arrays to a channel."""
    buffers: list[pickle.PickleBuffer] = []
    stored = pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for view in views:
        places.append((end, end + view.nbytes))
        end = -(-(end + view.nbytes) // _ALIGNED) * _ALIGNED
    if end < SHARED_BYTES or not hasattr(os, "memfd_create"):  # which is Linux's
        pickle.dump(((), pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), pipe, pickle.HIGHEST_PROTOCOL)
        pipe.flush()
        return
    descriptor = os.memfd_create("bytescale-plan")
    try:
        os.truncate(descriptor, end)
        for view, (begin, _) in zip(views, places, strict=True):
            _write(descriptor, view, begin)
        pickle.dump((places, stored), pipe, pickle.HIGHEST_PROTOCOL)
        pipe.flush()
        socket.send_fds(channel, [b"."], [descriptor])
    finally:
        os.close(descriptor)


def receive(pipe: BinaryIO, channel: socket.socket) -> object:
    """Return the next value. Its large arrays cannot be written.

    Raises:
        EOFError: the sender has ended.
    """
    places, stored = cast(tuple[list[tuple[int, int]], bytes], pickle.load(pipe))
    if not places:
        return pickle.loads(stored)
    descriptors = socket.recv_fds(channel, 1, 1)[1]
    if not descriptors:
        raise EOFError("the sender has ended")
    try:
        memory = memoryview(mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptors[0])
    return pickle.loads(stored, buffers=[memory[begin:end] for begin, end in places])


def _write(descriptor: int, view: memoryview, begin: int) -> None:
    while view.nbytes:
        written = os.pwrite(descriptor, view, begin)
        view, begin = view[written:], begin + written
