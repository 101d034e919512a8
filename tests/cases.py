"""Many small cases in one test: a failure names its case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Add a description of the case to an exception that it raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, what))}")
        raise


def for_each(
    names: str | tuple[str, ...], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each value of an argument, or of several, as ``parametrize`` would.

    One test runs all cases: collecting and reporting a test takes longer than a small case.
    """
    argument_names = (names,) if isinstance(names, str) else names
    all_values = [(values,) for values in cases] if isinstance(names, str) else list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        remaining = [p for p in signature.parameters.values() if p.name not in argument_names]

        @functools.wraps(test)
        def run(**other_arguments: Any) -> None:
            for values in all_values:
                arguments = dict(zip(argument_names, values, strict=True))
                with case(arguments):
                    test(**arguments, **other_arguments)

        run.__signature__ = signature.replace(parameters=remaining)  # type: ignore[attr-defined]
        return run

    return decorate
