"""``load``: what each rank does, in order.

    1  rank 0 looks for the saved state and sends its path to the others
    2  each rank reads the index, and the options of its optimizers
    3  rank 0 collects the faults of all ranks; if there are any, all ranks raise them
    4  each rank reads its own keys

Nothing is changed before step 4. After a fault of step 3 the stage can still be used; a file that
cannot be read ends the pipeline, as any error on one rank does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from procpipe.errors import SavedStateError
from procpipe.state import extras, generators, groups, optimizers
from procpipe.state.files import read_index
from procpipe.state.folders import find, not_shared, saved_in
from procpipe.state.keys import FileKeys
from procpipe.state.member import Member, raise_faults
from procpipe.state.sources import source_of, under
from procpipe.state.weights import all_faults, read_weights, weights_faults


@dataclass(frozen=True)
class Saved:
    """A saved state that was loaded."""

    path: Path  # its folder
    step: int | None  # what ``save`` was given as ``step``
    num_stages: int | None  # on how many stages it was saved; None if plain PyTorch wrote it


@overload
def load(
    folder: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: extras.Extra | None = None,
    step: int | None = None,
    strict: bool = True,
    missing_ok: Literal[False] = False,
) -> Saved: ...


@overload
def load(
    folder: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: extras.Extra | None = None,
    step: int | None = None,
    strict: bool = True,
    missing_ok: bool,
) -> Saved | None: ...


def load(
    folder: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: extras.Extra | None = None,
    step: int | None = None,
    strict: bool = True,
    missing_ok: bool = False,
) -> Saved | None:
    """Load the newest saved state of a run, saved on this or another number of stages.

    Every rank calls it, and reads only what its own stage needs. On the number of stages it was
    saved on, with the same balance, the run continues bit by bit as if it had not stopped. With
    another balance rank 0's ``extra`` counts; on another number of stages only rank 0's random
    number generators are restored.

    Args:
        folder: the run's folder, or one saved state in it; rank 0's counts.
        module: the stage; or any module with the full model's keys, in a process of its own.
        optimizer: of this rank's parameters, or several; its groups may be divided otherwise than
            when it was saved, as long as all members of one had the same options.
        extra: as for ``save``. Objects get their state, plain values are replaced.
        step: load the newest one saved with this ``step``.
        strict: refuse what is missing or left over, or of another dtype; otherwise what is missing
            stays as it is, and another dtype is converted if no more than precision is lost.
        missing_ok: return None where there is no saved state at all, as at the start of a run.

    Returns:
        What was loaded.

    Raises:
        FileNotFoundError: there is no such saved state.
        ValueError: lists every fault on every rank: missing and unexpected keys, other shapes.
        SavedStateError: a file is missing, damaged (it no longer fits its checksum), not inside of
            the folder, or contradicts another; what was read before may have been loaded.
        RemoteStageError: another rank failed, as on a file that cannot be read.

    Source: ``torch.distributed.checkpoint.load``.
    """
    member = Member.of(module)
    with member.call("state.load") as agree:
        member = member.among(agree)
        where = agree(None, lambda _: _find(Path(folder), step))  # 1
        if where["path"] is not None:
            loading = _Loading(member, optimizer, extra, where, strict=strict)
            saved = loading.weights.shapes

            def judge(facts: list[dict[str, Any]]) -> list[Any]:
                sources, conflicts = groups.match([of_rank["groups"] for of_rank in facts])
                return [sources, all_faults(facts, saved, strict=strict) + conflicts]

            sources, faults = agree(loading.facts(), judge)  # 2, 3
            if not faults:
                loading.read(sources)  # 4
                agree(None, lambda _: None)  # no rank goes on before all have read
                return loading.saved
    if where["path"] is not None:
        raise_faults(f"the saved state {where['path']} does not fit", faults)
    if missing_ok and where["is_empty"]:
        return None
    raise FileNotFoundError(where["why"])


def _find(folder: Path, step: int | None) -> dict[str, Any]:
    """Look for a saved state, on rank 0; the answer is plain JSON."""
    entry = find(folder, step)
    if entry is not None:
        return {"path": str(entry.path.absolute()), "step": entry.step}
    others = [str(other.step) for other in saved_in(folder) if other.step is not None]
    if not folder.is_dir():
        why = f"there is no folder {folder.absolute()}"
    elif others:
        why = f"{folder.absolute()} holds no saved state of step {step}, but of {', '.join(others)}"
    else:
        why = f"there is no saved state in {folder.absolute()}"
    return {"path": None, "why": why, "is_empty": not saved_in(folder)}


class _Loading:
    """One rank's part in loading a saved state."""

    def __init__(
        self,
        member: Member,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        extra: extras.Extra | None,
        where: dict[str, Any],
        *,
        strict: bool,
    ) -> None:
        self._member, self._extra, self._strict = member, extra, strict
        self._names = optimizers.Names(member.module, optimizer)
        self._keys = FileKeys.of(member.module)
        path = Path(where["path"])
        if not path.is_dir():
            raise not_shared(member.rank, path, "where rank 0 has found it", "load from")
        self._index = read_index(path)
        self._shapes = self._index.shapes
        self.weights = source_of(self._index)
        self._options = optimizers.read_options(self._names.all(), self._index)
        about = self._about()
        self.saved = Saved(path, about.get("step", where["step"]), about.get("num_stages"))
        self._is_same_number = self.saved.num_stages == member.num_ranks
        balance = about.get("balance")
        placement = about.get("placement") or list(range(member.num_ranks))
        self._is_same_cut = self._is_same_number and (
            None in (member.cut, balance)
            or member.cut == {"balance": balance, "placement": placement}
        )

    def _about(self) -> dict[str, Any]:
        """Return the facts saved about the whole run; none if plain PyTorch wrote it."""
        if "procpipe" not in self._shapes:
            return {}
        text = self._index.read(["procpipe"])["procpipe"]
        try:
            about = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise SavedStateError(f"{self._index.folder}: procpipe: {error}") from None
        num_stages = about.get("num_stages")
        if num_stages is not None and (type(num_stages) is not int or not 0 < num_stages < 1 << 20):
            raise SavedStateError(f"{self._index.folder}: procpipe: {num_stages!r:.50} stages")
        return about

    # -- what does not fit ----------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return this rank's keys, faults and groups, for rank 0."""
        faults = weights_faults(
            self._member.module.state_dict(),
            self._keys,
            self.weights.shapes,
            strict=self._strict,
            must_be_same_dtype=self._strict,
            layers=self._member.module.named_children(),
        )
        faults += self._optimizer_faults() + self._extra_faults()
        of_groups = groups.facts_of(self._names, self._options)
        return {"keys": self._keys.facts(), "faults": faults, "groups": of_groups}

    def _optimizer_faults(self) -> list[str]:
        if not self._names.optimizers:
            return []
        if not any(key.startswith("optimizer.") for key in self._shapes):
            return ["no optimizer was saved, so load without one"] if self._strict else []
        faults = optimizers.conflicts(self._names, self._options)
        faults += optimizers.state_faults(self._names, self._index, strict=self._strict)
        missing = [name for name, options in self._options.items() if self._strict and not options]
        return faults + [f"the optimizer's state of {name} is not in it" for name in missing]

    def _extra_faults(self) -> list[str]:
        if self._extra is None or self._member.rank > 0:
            return []
        saved = sorted(under("extra.", self._shapes))
        faults = []
        if self._strict:
            faults += [f"extra {n!r} was not saved" for n in self._extra if n not in saved]
            faults += [
                f"extra {n!r} was saved, but not asked for" for n in saved if n not in self._extra
            ]
        if not self._is_same_cut:
            for name in saved:
                if name in self._extra:
                    faults += self._carry_faults(name, self._extra[name])
        return faults

    def _carry_faults(self, name: str, current: Any) -> list[str]:
        """Return why a value does not fit another number of stages, if it does not."""
        first, *others = (extras.key_of(name, rank) for rank in range(self.saved.num_stages or 1))
        copies = {rank: key for rank, key in enumerate(others, 1) if key in self._shapes}
        read = self._index.read([first, *copies.values()] if copies else [])
        is_scheduler = isinstance(current, LRScheduler)
        what = "other learning rates" if is_scheduler else "other tensors"
        return [
            f"extra {name!r} has another form, or {what}, on rank {rank} than on rank 0, so it "
            f"can be loaded only on {self.saved.num_stages} stages with the balance they had"
            f"{extras.difference_of_groups(read[first], read[key], rank)}; leave it out, with "
            "strict=False"
            for rank, key in copies.items()
            if extras.differs(read[first], read[key], may_numbers=not is_scheduler)
        ][:1]

    # -- reading --------------------------------------------------------------------------------

    def read(self, sources: groups.Sources) -> None:
        rank, read = self._member.rank, self._index.read
        read_weights(self._member.module, self._keys, self.weights)
        if self._names.optimizers:
            optimizers.load_into(self._names, self._index, self._options, sources)
        extra = self._extra or {}
        for name in list(extra):
            own, first = extras.key_of(name, rank), extras.key_of(name, 0)
            key = own if self._is_same_cut and own in self._shapes else first
            if key in self._shapes:
                extras.load_extra(extra, name, read([key])[key])
        prefix = f"ranks.{rank}.generators."
        keys = [key for key in self._shapes if key.startswith(prefix)]
        # Rank 0's always: the order of the data comes from them.
        if keys and (self._is_same_number or rank == 0):
            generators.restore(under(prefix, read(keys)), self._member.device)
