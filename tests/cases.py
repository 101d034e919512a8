"""Many small cases in one test: a failure names its case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Add a description of the case to an exception that it raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, what))}")
        raise


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations of values, one of each axis, with every pair of two axes' values.

    ``itertools.product`` returns all combinations. Where a mode, a number of micro-batches and a
    balance are combined, a fault of one of them, or of two together, is found by either.
    """
    values = [list(axis) for axis in axes]
    indices = list(product(*(range(len(axis)) for axis in values)))

    def pairs_of(case: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(case), min(2, len(case))))

    missing = set().union(*map(pairs_of, indices))
    found = []
    while missing:
        best = max(indices, key=lambda case: len(missing & pairs_of(case)))
        missing -= pairs_of(best)
        found.append(best)
    return [tuple(map(list.__getitem__, values, case)) for case in sorted(found)]


def for_each(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    ids: Iterable[object] | Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each value of an argument, or of several, as ``parametrize`` would.

    One test runs all cases: collecting and reporting a test takes longer than a small case. A
    failure names the case by its arguments, and by its id if there are ``ids``: one for each case,
    or a function of its values.
    """
    argument_names = (names,) if isinstance(names, str) else names
    all_values = [(values,) for values in cases] if isinstance(names, str) else list(cases)
    if callable(ids):
        all_ids = [tuple(map(ids, values)) for values in all_values]
    else:
        all_ids = [() if ids is None else (id,) for id in ids or [None] * len(all_values)]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        remaining = [p for p in signature.parameters.values() if p.name not in argument_names]

        @functools.wraps(test)
        def run(**other_arguments: Any) -> None:
            for values, name in zip(all_values, all_ids, strict=True):
                arguments = dict(zip(argument_names, values, strict=True))
                with case(*name, arguments):
                    test(**arguments, **other_arguments)

        run.__signature__ = signature.replace(parameters=remaining)  # type: ignore[attr-defined]
        return run

    return decorate
