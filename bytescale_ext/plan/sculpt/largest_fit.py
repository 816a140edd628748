"""The greedy fits: by meaning and room inside a cluster, and by room alone for what is left over."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.sculpt.pieces import Ints, Vectors


def largest_fit(lengths: Ints, vectors: Vectors, context: int, overflow: str) -> tuple[Ints, Ints]:
    """Put pieces of one cluster into as many windows as they fill: semantic largest fit (DataSculpt, algorithm 2).

    The longest piece comes first. Each goes to the window with the largest product of its room and its similarity to
    what the window holds; an empty window is as similar as can be. So long pieces spread over empty windows, and
    windows hold few pieces. What finds no room is left over.

    Args:
        lengths: [n] tokens of each piece, at most ``context``.
        vectors: [n, d], unit length.
        context: tokens of a window.
        overflow: "none": a piece only goes where all of it fits; else its end may remain.

    Returns:
        Window of each piece [n], -1 where it is left over; tokens of each piece in its window [n].
    """
    window, taken = np.full(len(lengths), -1, dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    num_windows = int(lengths.sum()) // context
    if num_windows == 0:
        return window, taken
    room = np.full(num_windows, context, dtype=np.int64)
    sums = np.zeros((num_windows, vectors.shape[1]), dtype=np.float32)
    norms = np.zeros(num_windows, dtype=np.float32)
    for i in np.argsort(-lengths, kind="stable").tolist():
        needed = int(lengths[i]) if overflow == "none" else 1
        alike = np.divide(sums @ vectors[i], norms, out=np.ones_like(norms), where=norms > 0)
        score = np.where(room >= needed, alike * room, -np.inf)
        best = int(score.argmax())
        if room[best] < needed:
            continue
        window[i], taken[i] = best, min(int(lengths[i]), int(room[best]))
        room[best] -= taken[i]
        sums[best] += vectors[i]
        norms[best] = np.linalg.norm(sums[best])
    return window, taken


@dataclass(frozen=True, eq=False, slots=True)
class OpenWindows:
    """Windows that take more pieces.

    Attributes:
        context: tokens of a window.
        room: [windows] tokens that each has left.
        sums: [windows, d] sum of the vectors of what each holds.
    """

    context: int
    room: Ints
    sums: Vectors


def best_fit(lengths: Ints, vectors: Vectors, windows: OpenWindows, choices: int = 1) -> Ints:
    """Return the window of each piece [n], by best fit, longest first ("Fewer Truncations", arXiv 2404.10830).

    A piece goes to one of the fullest windows that it fits in, or opens a new one; numbers of new windows follow those
    of the open ones.

    Args:
        lengths: [n] tokens of each piece, at most ``windows.context``.
        vectors: [n, d], unit length.
        windows: the open windows.
        choices: of how many such windows the one most similar to the piece is taken.
    """
    rooms = sorted((room, number) for number, room in enumerate(windows.room.tolist()) if room > 0)
    sums = list(windows.sums)
    window = np.empty(len(lengths), dtype=np.int64)
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        first = bisect_left(rooms, (length, -1))
        if first == len(rooms):
            rooms.append((windows.context, len(sums)))
            sums.append(np.zeros(vectors.shape[1], dtype=np.float32))
        held = np.stack([sums[number] for _, number in rooms[first : first + choices]])
        norms = np.linalg.norm(held, axis=1)
        alike = np.divide(held @ vectors[i], norms, out=np.zeros_like(norms), where=norms > 0)
        room, number = rooms.pop(first + int(alike.argmax()))
        window[i] = number
        sums[number] = sums[number] + vectors[i]
        if room > length:
            insort(rooms, (room - length, number))
    return window
