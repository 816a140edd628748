"""MkDocs hooks: add the pages of the top folder, and adapt the links of the repository to the site.

README.md is the home page. A link to a file outside the site, such as a script, becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FROM_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top folder."""
    for name, address in FROM_TOP.items():
        files.append(File.generated(config, address, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the Markdown of a page with links that work on the site."""
    return links_of_site(markdown, page.file.src_uri)


def links_of_site(markdown: str, address: str) -> str:
    """Return a page with links that work on the site. Code blocks do not change.

    Args:
        markdown: text of the page, with links relative to its file in the repository.
        address: address of the page, relative to the top of the site.
    """
    names = {there: name for name, there in FROM_TOP.items()}
    source = names.get(address, posixpath.join("docs", address))

    def replace(link: re.Match[str]) -> str:
        picture, text, path, anchor = link.groups("")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in FROM_TOP:
            target = posixpath.join("docs", FROM_TOP[target])
        if not target.startswith("docs/"):
            return text
        place = posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(address) or ".")
        return f"{picture}[{text}]({place}{anchor})"

    parts = FENCE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(replace, part) for number, part in enumerate(parts))
