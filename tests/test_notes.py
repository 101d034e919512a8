"""A note is written where that is possible; a warning names the user's line."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from procpipe import notes
from procpipe.notes import progress, warn, write_note


def test_a_note_goes_to_what_replaces_standard_error_or_nowhere_if_that_is_closed(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    write_note("two\nlines")

    assert stream.getvalue() == "two\nlines\n"
    stream.close()
    write_note("a note")


@pytest.mark.parametrize("folder", ["_train", "2"])
def test_a_warning_names_the_users_line_also_in_a_folder_named_like_the_package(folder):
    script = f"{Path(notes.__file__).parent}{folder}/script.py"
    own: dict[str, Any] = {"warn": warn}
    exec(compile("def call():\n    warn('something')", notes.__file__, "exec"), own)
    users: dict[str, Any] = {"call": own["call"]}
    exec(compile("def train():\n\n    call()", script, "exec"), users)

    with pytest.warns(UserWarning, match="something") as caught:
        users["train"]()

    assert (caught[0].filename, caught[0].lineno) == (script, 3)


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch):
    shown = []
    for is_terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("measuring", 2) as advance:
            advance()
        shown.append(stream.getvalue())

    assert shown[0] == ""
    assert "measuring" in shown[1]
