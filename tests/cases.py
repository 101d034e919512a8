"""Many small cases in one test: a failure names its case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Add what the case is to an exception of it."""
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
    wanted = (names,) if isinstance(names, str) else names
    every = [(values,) for values in cases] if isinstance(names, str) else list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        others = [p for p in signature.parameters.values() if p.name not in wanted]

        @functools.wraps(test)
        def run(**rest: Any) -> None:
            for values in every:
                arguments = dict(zip(wanted, values, strict=True))
                with case(arguments):
                    test(**arguments, **rest)

        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
