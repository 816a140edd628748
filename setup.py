"""Ships ``bytescale_ext``, ``pretrain_gpt_hdp``, and ``megatron/bytescale`` beside pip's Megatron.

That is a PEP 420 portion: a ``megatron/__init__.py`` would hide the installed Megatron.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)]+)\)")


def description(readme: str, repository: str | None) -> str:
    """Return the README for package indexes, where no other file lies beside it.

    With the address of the repository, ``Repository`` of ``[project.urls]``, its links become absolute; without one,
    pictures are left out and links are plain text.
    """

    def replace(link: re.Match[str]) -> str:
        is_picture, text, path = link.groups()
        if repository is None:
            return "" if is_picture else text
        return f"{is_picture}[{text}]({repository}/{'raw' if is_picture else 'blob'}/HEAD/{path})"

    return LINK.sub(replace, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        packages=find_namespace_packages(include=["megatron.bytescale*", "bytescale_ext*"]),
        py_modules=["pretrain_gpt_hdp"],
        package_data={"bytescale_ext.measure.costs": ["*.json"]},
        long_description=description(
            (ROOT / "README.md").read_text(encoding="utf-8"), project["urls"].get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
