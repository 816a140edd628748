"""Ships ``megatron/bytescale`` beside pip's Megatron (a PEP 420 portion: no ``megatron/__init__.py``) and ``bytescale_ext``."""

from setuptools import find_namespace_packages, setup

setup(packages=find_namespace_packages(include=["megatron.bytescale*", "bytescale_ext*"]))
