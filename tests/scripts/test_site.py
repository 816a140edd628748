"""The site builds in strict mode with every page, and its links have the same targets as in the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.site import FROM_TOP, links_of_site

ROOT = Path(__file__).resolve().parents[2]


def pages_of(nav: object) -> list[str]:
    """Return the addresses of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav if isinstance(nav, list) else list(nav.values()) if isinstance(nav, dict) else []
    return [address for part in parts for address in pages_of(part)]


def test_the_navigation_has_every_page_once() -> None:
    named = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    of_docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted([*of_docs, *FROM_TOP.values()])
    assert named[0] == "index.md"


@pytest.mark.parametrize(
    ("address", "text", "expected"),
    [
        (
            "index.md",
            "[a](docs/guide/recipes.md#x) ![b](docs/timeline.png)",
            "[a](guide/recipes.md#x) ![b](timeline.png)",
        ),
        ("index.md", "[c](CONTRIBUTING.md) [d](LICENSE) [e](#f)", "[c](contributing.md) d [e](#f)"),
        ("guide/states.md", "[g](../results/slices.md) [h](../../scripts/bench/LOG.md)", "[g](../results/slices.md) h"),
        ("guide/faq.md", "[i](../../README.md#data) [j](limits.md)", "[i](../index.md#data) [j](limits.md)"),
        ("guide/faq.md", "[k](https://example.org/a.md)", "[k](https://example.org/a.md)"),
        ("index.md", "```\n[l](LICENSE)\n```\n[m](LICENSE)", "```\n[l](LICENSE)\n```\nm"),
    ],
)
def test_links(address: str, text: str, expected: str) -> None:
    assert links_of_site(text, address) == expected


def build(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config), "-d", str(folder)]
    given = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=given, text=True, capture_output=True, timeout=300)


@pytest.mark.full
@pytest.mark.ranks  # starts a process
def test_it_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    built = build(tmp_path / "site", ROOT / "mkdocs.yml")
    assert built.returncode == 0, built.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    assert "Two commands" in home
    assert "<table>" in home
    assert 'href="guide/quickstart/"' in home
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://[^"]*"', text), page
    steps = (tmp_path / "site" / "guide" / "quickstart" / "index.html").read_text()
    assert "../../#move-a-launch-line-over" in steps
