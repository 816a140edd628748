"""Ships ``bytescale_ext``, ``pretrain_gpt_hdp``, and ``megatron/bytescale`` beside pip's Megatron.

That is a PEP 420 portion: a ``megatron/__init__.py`` would hide the installed Megatron.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["megatron.bytescale*", "bytescale_ext*"]),
    py_modules=["pretrain_gpt_hdp"],
    package_data={"bytescale_ext.measure.costs": ["*.json"]},
)
