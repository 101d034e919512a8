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
from functools import partial
from operator import itemgetter
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from procpipe.state import extras, files, optimizers, sharded
from procpipe.state.keys import FileKeys
from procpipe.state.member import Member, raise_faults
from procpipe.state.resumable import restore_generators
from procpipe.state.values import Stored, replaced
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
        path, others = agree(lambda: _find(member, Path(folder), step), itemgetter(0))  # 1
        if path:
            contents = files.read(Path(path))  # 2
            if not contents:
                raise FileNotFoundError(
                    f"{path} is not whole on rank {member.rank}, but is on rank 0: all ranks need "
                    "a file system that they share"
                )
            is_same_number = len(contents) == member.num_ranks
            own = contents[member.rank if is_same_number else 0]
            is_same_cut = is_same_number and own["about"].items() >= (member.cut or {}).items()
            model = sharded.merged(contents, "model")
            saved = optimizers.SavedOptimizers([each["optimizer"] for each in (own, *contents)])
            keys, groups = FileKeys.of(module), optimizers.groups_of(module, optimizer)
            faults = weights_faults(module, keys, model, strict=strict, must_be_same_dtype=strict)
            faults += optimizers.faults_of(groups, saved, strict=strict)
            if extra is not None and member.rank == 0:
                of_ranks = [of_rank["extra"] for of_rank in contents]
                faults += extras.faults_of(extra, of_ranks, strict=strict, is_same_cut=is_same_cut)
            judge = partial(all_faults, saved=model, strict=strict)
            faults = agree({"keys": keys.facts(), "faults": faults}, judge)  # 3
            if not faults:
                read_weights(module, keys, model)  # 4
                optimizers.load_into(groups, saved)
                own_extra = own["extra"] if is_same_cut else {}
                extras.load(extra or {}, contents[0]["extra"] | own_extra)
                # Rank 0's always: the order of the data comes from them.
                if is_same_number or member.rank == 0:
                    states = replaced(own["generators"], Stored, Stored.copy)
                    restore_generators(states, member.device)
                agree(None, len)  # no rank goes on before all have read
                return Saved(Path(path), own["about"]["step"], len(contents))
    if path:
        raise_faults(f"the saved state {path} does not fit", faults)
    if missing_ok and not others:
        return None
    raise FileNotFoundError(f"there is no saved state in {folder}{others}")


def _find(member: Member, folder: Path, step: int | None) -> list[str]:
    """Look for a saved state, on rank 0: its path, or what there is instead."""
    folder = folder.absolute()
    if member.rank > 0:
        return ["", ""]
    if found := files.find(folder, step):
        return [str(found), ""]
    others = ", ".join(other.name for other in files.saved_in(folder))
    of_step = "" if step is None else f" of step {step}"
    return ["", others and f"{of_step}, but {others}"]
