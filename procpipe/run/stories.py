"""Describes an exception to other ranks: in a bounded text, whatever its class does.

The ``__str__`` of a user's exception may raise, even a ``SystemExit`` or a
``KeyboardInterrupt``; neither that nor a text of megabytes may stop the report to the others.
"""

from __future__ import annotations

import traceback

#: The most characters of an exception's text in a line.
_LINE_LENGTH = 200

#: The most characters of a description, its traceback included, that are sent.
_STORY_LENGTH = 1 << 16


def text_of(error: BaseException) -> str:
    """Return an exception's text; the ``__str__`` of a user's may raise."""
    try:
        return str(error)
    except BaseException as another:
        return f"(what it says is not known: its __str__ raised {type(another).__name__})"


def in_a_line(error: BaseException) -> str:
    """Return an exception's type and the first line of what it says."""
    lines = text_of(error).splitlines() or [""]
    line = lines[0] if len(lines[0]) <= _LINE_LENGTH else f"{lines[0][:_LINE_LENGTH]}…"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def story_of(error: BaseException) -> str:
    """Return an exception with its traceback, causes and notes, shortened in the middle."""
    try:
        story = "".join(traceback.format_exception(error))
    except BaseException as another:  # its notes or causes cannot be read
        story = (
            "Traceback (most recent call last):\n"
            f"{''.join(traceback.format_tb(error.__traceback__))}{in_a_line(error)}\n"
            f"(its notes and causes are not known: reading them raised {type(another).__name__})\n"
        )
    if len(story) > _STORY_LENGTH:  # all peers must receive it before this process ends
        half = _STORY_LENGTH // 2
        story = f"{story[:half]}\n… {len(story) - 2 * half} characters …\n{story[-half:]}"
    return story
