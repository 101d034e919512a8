"""Finds the traceback in what a rank wrote, and shortens it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_START = re.compile(
    r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE
)
#: A syntax error in the script itself, which has no head line.
_SYNTAX = re.compile(r'^  File ".*", line \d+\n(?:.*\n)*?\w*Error: ', re.MULTILINE)
_CHAIN = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception|"
    r"During handling of the above exception, another exception occurred):\n\n$"
)
#: The line that names an exception, or a group of them.
_EXCEPTION = re.compile(r"(?:  \| )?([^\s|+].*)")
_FRAME = re.compile(r'^  File "(.*)", line \d+, in ')
#: Files whose frames seldom help a user: this package's, installed or not, and torch's.
_OURS = re.compile(r"[/\\](?:procpipe|torch)[/\\](?!.*[/\\](?:tests|examples)[/\\])")

_MAX_LINES = 120


def printed_traceback(text: str) -> str:
    """Return the last traceback in a text, with those chained to it; "" if there is none."""
    starts = [match.start() for match in _START.finditer(text)]
    if not starts:
        match = _SYNTAX.search(text)
        return text[match.start() :].rstrip() if match else ""
    first = len(starts) - 1
    while first > 0 and _CHAIN.search(text[starts[first - 1] : starts[first]]):
        first -= 1
    return text[starts[first] :].rstrip()


def exception_line(trace: str) -> str:
    """Return the line of a traceback that names the exception; "" if there is none."""
    heads = [match.end() for match in _START.finditer(trace)]
    lines = trace[heads[-1] if heads else 0 :].splitlines()
    found = (_EXCEPTION.match(line) for line in lines)
    return next((match.group(1) for match in found if match), "")


def folded(trace: str) -> str:
    """Leave out frames in this package and in torch, but for the last of each traceback."""
    lines: list[str] = []
    hidden: list[list[str]] = []
    for frame, text in _frames(trace):
        if frame and _OURS.search(frame):
            hidden.append(text)
            continue
        if hidden and not frame:  # the traceback ends in one of them
            lines += [*_fold(hidden[:-1]), *hidden[-1]]
        else:
            lines += _fold(hidden)
        hidden = []
        lines += text
    lines += [line for text in hidden for line in text]
    if len(lines) > _MAX_LINES:
        middle = f"… {len(lines) - _MAX_LINES} lines, which are in the log"
        lines[_MAX_LINES // 2 : -_MAX_LINES // 2] = [middle]
    return "\n".join(lines)


def _frames(trace: str) -> Iterator[tuple[str, list[str]]]:
    """Split a traceback into frames (their file, their lines), and what is between them ("")."""
    file = ""
    text: list[str] = []
    for line in trace.splitlines():
        match = _FRAME.match(line)
        is_inside = bool(file) and line.startswith("    ")
        if match or not is_inside:
            if text:
                yield file, text
            file, text = (match.group(1) if match else ""), []
        text.append(line)
    if text:
        yield file, text


def _fold(frames: list[list[str]]) -> list[str]:
    if len(frames) < 2:
        return [line for text in frames for line in text]
    return [f"  … {len(frames)} frames in procpipe and torch"]
