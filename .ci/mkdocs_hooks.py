"""For the site: links that leave docs/ become plain text, if what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]*)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page for the site, whose reader has the pages only."""
    return _OUTSIDE.sub(_as_text, markdown)


def _as_text(link: re.Match[str]) -> str:
    text, path = link.groups()
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{link[0]} names no file of the repository")
    return text
