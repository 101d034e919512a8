"""``load``: what each rank does, in order.

    1  rank 0 looks for the newest whole state and sends its path to the others
    2  each rank maps the files of all ranks, and merges what they hold by name
    3  rank 0 collects the faults of all ranks; if there are any, all ranks raise them
    4  each rank copies its own values

Nothing is changed before step 4. After a fault of step 3 the stage can still be used; a file that
cannot be read ends the pipeline, as any error on one rank does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from procpipe.state import extras, generators, groups, optimizers, sharded
from procpipe.state.files import find, not_shared, read, saved_in
from procpipe.state.keys import FileKeys
from procpipe.state.member import Member, attempt, raise_faults
from procpipe.state.stored import Stored
from procpipe.state.values import replaced
from procpipe.state.weights import all_faults, read_weights, weights_faults


@dataclass(frozen=True)
class Saved:
    """A saved state that was loaded."""

    path: Path  # its folder
    step: int | None  # what ``save`` was given as ``step``
    num_stages: int  # how many ranks saved it


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
        What was loaded; None only with ``missing_ok``.

    Raises:
        FileNotFoundError: there is no such saved state.
        ValueError: lists every fault on every rank: missing and unexpected keys, other shapes.
        SavedStateError: a file of the newest whole state is damaged; what was read before may have
            been loaded.
        RemoteStageError: another rank failed, as on a file that cannot be read.

    Source: ``torch.distributed.checkpoint.load``.
    """
    member = Member.of(module)
    with member.call("state.load") as agree:
        member, agree = member.among(agree)
        found = attempt(lambda: _find(Path(folder), step)) if member.rank == 0 else None  # 1
        where = agree(found, itemgetter(0))
        if where["path"] is not None:
            loading = _Loading(member, optimizer, extra, Path(where["path"]), strict=strict)

            def judge(facts: list[dict[str, Any]]) -> list[Any]:
                sources, conflicts = groups.match([of_rank["groups"] for of_rank in facts])
                return [sources, all_faults(facts, loading.model, strict=strict) + conflicts]

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
        path: Path,
        *,
        strict: bool,
    ) -> None:
        self._member, self._extra, self._strict = member, extra, strict
        self._names = optimizers.Names(member.module, optimizer)
        self._keys = FileKeys.of(member.module)
        self._contents = contents = read(path)
        if not contents:
            raise not_shared(member.rank, path, "where rank 0 has found it", "load from")
        self.model = sharded.merged(contents, "model")
        of_optimizers = [of_rank["optimizer"] for of_rank in contents]
        self._optimizers = optimizers.SavedOptimizers.of(of_optimizers)
        about = contents[0]["about"]
        self.saved = Saved(path, about["step"], len(contents))
        self._is_same_number = len(contents) == member.num_ranks
        cut = {key: about[key] for key in ("balance", "placement") if key in about}
        self._is_same_cut = self._is_same_number and (
            member.cut is None or not cut or member.cut == cut
        )

    def facts(self) -> dict[str, Any]:
        """Return this rank's keys, faults and groups, for rank 0."""
        strict = self._strict
        faults = weights_faults(
            self._member.module.state_dict(),
            self._keys,
            self.model,
            strict=strict,
            must_be_same_dtype=strict,
            layers=self._member.module.named_children(),
        )
        if self._names.optimizers:
            faults += optimizers.faults_of(self._names, self._optimizers, strict=strict)
        if self._extra is not None and self._member.rank == 0:
            saved = [of_rank["extra"] for of_rank in self._contents]
            is_same_cut = self._is_same_cut
            faults += extras.faults_of(self._extra, saved, strict=strict, is_same_cut=is_same_cut)
        of_groups = groups.facts_of(self._names, self._optimizers)
        return {"keys": self._keys.facts(), "faults": faults, "groups": of_groups}

    def read(self, sources: groups.Sources) -> None:
        """Copy this rank's values."""
        rank = self._member.rank
        read_weights(self._member.module, self._keys, self.model)
        if self._names.optimizers:
            optimizers.load_into(self._names, self._optimizers, sources)
        first = self._contents[0]
        own = self._contents[rank] if self._is_same_number else first
        if self._extra is not None:
            of_rank = own["extra"] if self._is_same_cut else {}
            extras.load(self._extra, first["extra"] | of_rank)
        # Rank 0's always: the order of the data comes from them.
        if self._is_same_number or rank == 0:
            states = replaced(own["generators"], Stored, Stored.read)
            generators.restore(states, self._member.device)
