"""Every exception can be described, even if methods of its class raise."""

from __future__ import annotations

import pytest

from procpipe.run.faults import in_a_line, story_of, text_of


class EvilError(Exception):
    """Its ``str()`` raises another error."""

    def __init__(self, another):
        super().__init__()
        self.another = another

    def __str__(self):
        raise self.another


class EvilNotesError(Exception):
    """Reading its notes raises."""

    def __getattribute__(self, name):
        if name == "__notes__":
            raise KeyboardInterrupt
        return super().__getattribute__(name)


class NumberError(Exception):
    """Its ``str()`` returns a number."""

    def __str__(self):
        return 3  # noqa: PLE0307


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("another", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_an_error_whose_str_raises(another):
    error = raised(EvilError(another))

    text = f"(what it says is not known: its __str__ raised {another.__name__})"
    assert text_of(error) == text
    assert in_a_line(error) == f"EvilError: {text}"
    assert "in raised\n    raise error" in story_of(error)


def test_an_error_whose_str_returns_a_number():
    assert in_a_line(NumberError()).endswith("its __str__ raised TypeError)")


def test_a_cause_whose_str_raises():
    error = KeyError("boom")
    error.__cause__ = raised(EvilError(SystemExit))

    assert "KeyError: 'boom'" in story_of(raised(error))


def test_notes_that_cannot_be_read():
    story = story_of(raised(EvilNotesError("boom")))

    assert "in raised\n    raise error" in story
    assert "EvilNotesError: boom\n" in story
    assert "reading them raised KeyboardInterrupt" in story


def test_notes_that_are_no_list():
    error = KeyError("boom")
    vars(error)["__notes__"] = 7

    assert "KeyError: 'boom'" in story_of(raised(error))


def test_causes_that_form_a_circle():
    first, second = KeyError("one"), KeyError("other")
    first.__cause__, second.__cause__ = second, first

    assert story_of(raised(first)).count("KeyError: 'one'") == 1


def test_a_story_that_is_too_long():
    error = raised(ValueError("start" + "x" * (1 << 20) + "end"))

    assert len(story_of(error)) < 1 << 17
    assert story_of(error).endswith("xend\n")
    assert in_a_line(error) == f"ValueError: start{'x' * 195}…"
