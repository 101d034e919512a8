"""A note is written where that is possible; elsewhere it is dropped without an error."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from procpipe import notes
from procpipe.notes import warn, write_note


class Refusing:
    """A standard error whose every method raises."""

    def write(self, text):
        raise RuntimeError("not here")

    flush = write


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Refusing(), object(), closed()])
def test_a_stream_that_cannot_be_written_to_is_no_error(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)

    write_note("a note")


def test_a_note_goes_to_the_stream_that_replaces_standard_error(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    write_note("two\nlines")

    assert stream.getvalue() == "two\nlines\n"


def test_characters_that_an_encoding_lacks_are_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))

    write_note("layer 'ä'")

    assert raw.getvalue() == b"layer '\\xe4'\n"


WRITER = """
import os, sys, importlib.util
spec = importlib.util.spec_from_file_location("notes", {path!r})
notes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notes)
{before}
notes.write_note("a note \\u2028 \\ud800")
print("goes on", flush=True)
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    "before",
    [
        "",
        "r, w = os.pipe(); os.dup2(w, 2); os.close(w); os.close(r)",
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
        "os.close(2)",
        "sys.stderr.close()",
        "sys.stderr = sys.__stderr__ = None",
    ],
    ids=["well", "broken pipe", "full disk", "no descriptor", "closed", "None"],
)
def test_the_process_still_ends_with_exit_code_0(before):
    """Text left in Python's buffer would fail when it is flushed at the end: exit code 120."""
    from procpipe import notes

    code = WRITER.format(path=notes.__file__, before=before)
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (0, b"goes on\n")
    if not before:
        assert done.stderr == b"a note \xe2\x80\xa8 \\ud800\n"


def test_a_warning_that_cannot_be_written_is_dropped(monkeypatch):
    def show(*arguments, **options):  # like Python's own, which pytest has replaced
        closed().write("something")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        warn("something")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="something"):
            warn("something")


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
