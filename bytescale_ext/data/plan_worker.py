"""A process that plans steps: ``python -m bytescale_ext.data.plan_worker``.

Standard input brings a pickled planner and then the lengths of one step after another; standard output takes each plan,
or the error that the planner raised. It ends when its input does. See ``bytescale_ext.data.planning``.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO


def main() -> None:
    """Plan until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that is printed gets between the answers
    serve(sys.stdin.buffer, answers)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer each request."""
    planner = pickle.load(requests)
    while True:
        try:
            lengths = pickle.load(requests)
        except EOFError:
            return
        answer: object
        try:
            answer = planner(lengths)
        except Exception as error:  # the one who asked raises it
            answer = error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
