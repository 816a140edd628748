"""Process that plans steps: ``python -m bytescale_ext.data.loading.plan_worker``.

It reads a pickled planner from standard input, followed by the lengths, the expert imbalance and the learned costs of
each step. It writes each plan, or the planner's error, to standard output, and exits when its input ends. Its argument
is the descriptor of the socket for the memory of large arrays (``plan_pipe``).
``bytescale_ext.data.loading.planning`` starts it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from typing import BinaryIO

from bytescale_ext.data.loading.plan_pipe import send
from bytescale_ext.data.loading.planning import planner_at


def main() -> None:
    """Plan steps until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output must not mix with the answers
    serve(sys.stdin.buffer, answers, socket.socket(fileno=int(sys.argv[1])))


def serve(requests: BinaryIO, answers: BinaryIO, channel: socket.socket) -> None:
    """Send a plan, or the planner's error, for each pickled triple of lengths, expert imbalance and costs."""
    planner = pickle.load(requests)
    while True:
        try:
            lengths, imbalance, learned = pickle.load(requests)
        except EOFError:
            return
        answer: object
        try:
            answer = planner_at(planner, imbalance, learned)(lengths)
        except Exception as error:  # the requesting process raises it
            answer = error
        send(answer, answers, channel)


if __name__ == "__main__":
    main()
