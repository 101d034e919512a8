"""Random number generators, and a data loader that can be resumed in the middle of an epoch.

    epoch starts                      saved                      epoch ends
    │ start: generators' states       │ given: 4                 │
    ├──── 0 ──── 1 ──── 2 ──── 3 ─────┼──── 4 ──── 5 ──── 6 ─────┤

    resumed:  set the generators to "start", begin the epoch, skip the items already given,
              set the generators to their states when it was saved, go on

A shuffled loader draws its order from the generators as an epoch begins, so this is the same order.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch


class Resumable:
    """A data loader whose position in the epoch can be saved.

    Iterate over it in place of the loader, and pass it in the ``extra`` of ``state.save`` and
    ``state.load``. A resumed run continues with exactly the rest of the epoch; random numbers that
    the loader takes from torch, Python's ``random`` and numpy are the same as without a stop,
    except those that a dataset draws in processes that outlive an epoch
    (``persistent_workers=True``). Rank 0's counts, so on other ranks any loader will do. Does not
    communicate.

    Items of the epoch that were given before are read again and skipped.

    Args:
        loader: yields the mini-batches of an epoch each time it is iterated over.

    Attributes:
        loader: the same.

    Source: torchdata's ``StatefulDataLoader``, which needs datasets and samplers that keep a state.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._given = 0
        self._start: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._epoch: object = None

    def __len__(self) -> int:
        """Return the number of mini-batches of a whole epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        this = self._epoch = object()
        items = self._begin()
        try:
            for item in items:
                # Before the yield, as a save in the loop includes it. The newest loop's counts.
                self._given += self._epoch is this
                yield item
        except Exception:  # of the loader: what it has given counts, until it begins anew
            self._epoch = None
            raise
        finally:
            if self._epoch is this:
                self._given, self._start, self._epoch = 0, None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch and the generators that determine its order."""
        if self._resume is not None:
            return self._resume
        now = [generator.get_state() for generator in _generators_of(self.loader)]
        return {"given": self._given, "start": self._start, "now": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position that ``state_dict`` returned, when next iterated over."""
        self._resume = state

    def _begin(self) -> Iterator[Any]:
        """Begin an epoch, or the one that was interrupted, after the items already given."""
        resume, self._resume = self._resume, None
        own = _generators_of(self.loader)
        if resume is not None:
            _set_all(own, resume["now"])
        now = states_of_generators()
        now["own"] = [generator.get_state() for generator in own]
        self._given, self._start = 0, now
        if resume is None or not resume["given"]:
            return iter(self.loader)
        self._given, self._start = resume["given"], resume["start"]
        restore_generators(resume["start"])
        _set_all(own, resume["start"]["own"])
        items = iter(self.loader)
        num_passed = sum(1 for _ in islice(items, self._given))
        if num_passed < self._given:
            raise ValueError(
                f"the run was interrupted after {self._given} mini-batches of an epoch, but now "
                f"the loader ends after {num_passed}: build the loader as it was"
            )
        restore_generators(now)
        _set_all(own, now["own"])
        return items


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader or its samplers were given."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [loader, getattr(loader, "sampler", None), batch_sampler]
    holders.append(getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _set_all(own: list[torch.Generator], saved: list[torch.Tensor]) -> None:
    if len(own) != len(saved):
        raise ValueError(f"the loader had {len(saved)} torch.Generators, and has {len(own)} now")
    for generator, state in zip(own, saved, strict=True):
        generator.set_state(state)


# -- the generators of a process -----------------------------------------------------------------


def states_of_generators(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of torch's generators, of a GPU too, Python's, and numpy's if in use."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device is not None and device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (name, words.tolist(), *rest)
    return found


def restore_generators(saved: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to what ``states_of_generators`` returned, also in another process."""
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    if device is not None and device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)
    if "numpy" in saved:
        import numpy as np

        np.random.set_state(saved["numpy"])
