"""Stages of work on a corpus, whose tasks run on the executors of datatrove."""
