"""Greedy fits: by similarity and room inside a cluster, and best fit for the remaining pieces."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.sculpt.pieces import Ints, Vectors


def largest_fit(lengths: Ints, vectors: Vectors, context: int, overflow: str) -> tuple[Ints, Ints]:
    """Assign pieces of one cluster to windows by semantic largest fit (DataSculpt, algorithm 2).

    The number of windows is the number that the tokens of the cluster can fill. Pieces are assigned in order of length,
    longest first. A piece goes to the window with the largest product of free room and similarity to the contents of
    the window. The similarity to an empty window is 1. So long pieces spread over empty windows, and windows contain
    few pieces. Pieces of ``context`` tokens come first, in a window each, which needs no comparison.

    Args:
        lengths: tokens of each piece, at most ``context``; [n].
        vectors: unit vectors, [n, d].
        context: tokens of a window.
        overflow: "none" assigns only whole pieces; with other values the end of a piece may remain.

    Returns:
        Window of each piece, or -1 for a piece that does not fit, [n]; assigned tokens of each piece, [n].
    """
    window, taken = np.full(len(lengths), -1, dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    num_windows = int(lengths.sum()) // context
    if num_windows == 0:
        return window, taken
    full = np.flatnonzero(lengths == context)
    num_full = len(full)
    window[full], taken[full] = np.arange(num_full), context
    if num_full == num_windows:
        return window, taken
    room = np.full(num_windows - num_full, context, dtype=np.int64)
    sums = np.zeros((num_windows - num_full, vectors.shape[1]), dtype=np.float32)
    norms = np.zeros(num_windows - num_full, dtype=np.float32)
    for i in np.argsort(-lengths, kind="stable")[num_full:].tolist():
        needed = int(lengths[i]) if overflow == "none" else 1
        similarity = np.divide(sums @ vectors[i], norms, out=np.ones_like(norms), where=norms > 0)
        score = np.where(room >= needed, similarity * room, -np.inf)
        best = int(score.argmax())
        if room[best] < needed:
            continue
        window[i], taken[i] = num_full + best, min(int(lengths[i]), int(room[best]))
        room[best] -= taken[i]
        sums[best] += vectors[i]
        norms[best] = np.linalg.norm(sums[best])
    return window, taken


@dataclass(frozen=True, eq=False, slots=True)
class OpenWindows:
    """Windows that have room for more pieces.

    Attributes:
        context: tokens of a window.
        room: free tokens of each window, [windows].
        sums: sum of the vectors of the pieces in each window, [windows, d].
    """

    context: int
    room: Ints
    sums: Vectors


def best_fit(lengths: Ints, vectors: Vectors, windows: OpenWindows, choices: int = 1) -> Ints:
    """Return the window of each piece by best fit, longest piece first: [n] ("Fewer Truncations", arXiv 2404.10830).

    Among the ``choices`` fullest windows with enough room, a piece goes to the most similar window. If no window has
    enough room, the piece opens a new window. New windows are numbered after the open windows.

    Args:
        lengths: tokens of each piece, at most ``windows.context``; [n].
        vectors: unit vectors, [n, d].
        windows: open windows.
        choices: number of windows that are compared by similarity.
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
        contents = np.stack([sums[number] for _, number in rooms[first : first + choices]])
        norms = np.linalg.norm(contents, axis=1)
        similarity = np.divide(contents @ vectors[i], norms, out=np.zeros_like(norms), where=norms > 0)
        room, number = rooms.pop(first + int(similarity.argmax()))
        window[i] = number
        sums[number] = sums[number] + vectors[i]
        if room > length:
            insort(rooms, (room - length, number))
    return window
