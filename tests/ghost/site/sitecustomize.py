"""Gives the operators of ghost GPUs their kernels when a process of ``tests.ghost.run`` starts."""

from tests.ghost import kernels

kernels.install()
