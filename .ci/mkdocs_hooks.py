"""For the site: links that leave docs/ become plain text, if what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"

_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]*)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page for the site, whose reader has the pages only."""
    folder = (DOCS / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {link[0]} names no file")
        return link[1]

    return _LINK.sub(replaced, markdown)
