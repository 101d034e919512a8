"""Many small cases in one test, which names the case that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


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
                case = dict(zip(wanted, values, strict=True))
                try:
                    test(**case, **rest)
                except BaseException as error:
                    error.add_note(f"in the case {case}")
                    raise

        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
