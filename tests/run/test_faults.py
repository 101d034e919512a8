"""An exception is described in a line, and with all its causes, but never at any length."""

from __future__ import annotations

from procpipe.run.faults import in_a_line, story_of


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_story_has_causes_and_notes():
    error = KeyError("boom")
    error.add_note("in layer 3")
    error.__cause__ = raised(ValueError("before"))

    story = story_of(raised(error))

    assert story.index("ValueError: before") < story.index("KeyError: 'boom'\nin layer 3")


def test_a_line_has_only_the_first_line_and_a_long_story_its_ends():
    error = raised(ValueError("start" + "x" * (1 << 20) + "end"))

    assert in_a_line(ValueError("first\nsecond")) == "ValueError: first"
    assert in_a_line(ValueError()) == "ValueError"
    assert in_a_line(error) == f"ValueError: start{'x' * 195}…"
    assert len(story_of(error)) < 1 << 17
    assert story_of(error).endswith("xend\n")
