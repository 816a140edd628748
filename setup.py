"""Ships ``bytescale_ext``, and ``megatron/bytescale`` beside pip's Megatron.

That is a PEP 420 portion: a ``megatron/__init__.py`` would hide the installed Megatron.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["megatron.bytescale*", "bytescale_ext*"]),
    package_data={"bytescale_ext.measure.costs": ["*.json"]},
)
