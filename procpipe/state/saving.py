"""``save``: what each rank does, in order.

1  wait for the save before this one, if it is still under way
2  each rank finds out what cannot be saved; if there is any, all ranks raise it
3  rank 0 makes the folder and sends its name and a nonce to the others
4  each rank writes its file; in the background, of copies
5  when all have, rank 0 removes old states (background.py)
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from procpipe.errors import StageClosedError
from procpipe.state import extras, files, optimizers
from procpipe.state.background import Saving, unfinished
from procpipe.state.member import Member, of_all_ranks
from procpipe.state.resumable import states_of_generators
from procpipe.state.values import CAN_BE, copied, saved_form
from procpipe.version import __version__


def save(
    folder: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: extras.Extra | None = None,
    step: int | None = None,
    keep: int | None = 3,
    asynchronous: bool = False,
) -> Saving:
    """Save a run so that it can be resumed on this or another number of stages.

    Every rank calls it, between two steps. It returns once the whole saved state is on the disk;
    or, in the background, once copies have been made in memory (pinned, of tensors on a GPU). A
    crash during a save leaves earlier saved states as they are.

    Saved are parameters and buffers, the optimizer's state and options, the random number
    generators of each rank, and ``extra``; not the gradients, so save after the optimizer's step.
    A saved state is a folder with a file of ``torch.save`` for each rank, which
    ``torch.load(weights_only=True)`` reads: dicts by the names of the full model.

    Args:
        folder: the run's folder, on a file system that all ranks share, and of one job at a time;
            rank 0's counts.
        module: the stage; or any module, in a process of its own.
        optimizer: of this rank's parameters; or several.
        extra: plain values, and objects with ``state_dict()`` and ``load_state_dict()`` such as a
            learning rate scheduler or a ``Resumable``, by name; the same names on every rank.
            Numbers of NumPy are saved as those of Python.
        step: becomes part of the saved state's name; rank 0's counts.
        keep: how many saved states to leave in the folder, this one included; None for all.
        asynchronous: write in the background. The next save waits for it, and raises its error on
            every rank. The end of a script waits for its own rank's file, exits with code 1 if that
            could not be written, and removes no old states.

    Returns:
        The save: its ``path``, and ``wait()`` for one in the background.

    Raises:
        OSError: the disk is full, or the folder is not shared by all ranks.
        RemoteStageError: another rank failed.
        StageClosedError: an earlier call has failed, or the stage was closed: nothing was saved.
        TypeError: lists, on every rank, what ``torch.load(weights_only=True)`` would not load on
            any rank; nothing was written, and the stage can still be used.
        ValueError: a parameter of the optimizer that is not the module's; other names in
            ``extra``, or other arguments, than on rank 0; a wrong ``keep`` or ``step``.

    Source: ``torch.distributed.checkpoint.save``.
    """
    member, place = Member.of(module), Path(folder).absolute()
    _check(keep, step)
    if member.calls is not None and (why := member.calls.ended):
        raise StageClosedError(f"nothing was saved in {place}: state.save() cannot run: {why}")
    if before := unfinished.get(module):
        before.wait()  # 1
    with member.call("state.save") as agree:
        member, agree = member.among(agree)
        groups = optimizers.groups_of(module, optimizer)
        faults: list[str] = []
        values = _gather(member, groups, extra, faults)
        num_optimizers = len({id(group.optimizer) for group in groups})
        asked_for = (
            f"asynchronous={bool(asynchronous)}, {num_optimizers} optimizers, "
            f"extra named {sorted(extra or ())}"
        )
        faults = agree({"asked for": asked_for, "faults": faults}, _judge)  # 2
        if not faults:
            begin = partial(files.begin, place, step) if member.rank == 0 else str
            begun, nonce = agree(lambda: [str(begin()), secrets.token_hex(8)], itemgetter(0))  # 3
            versions = {"procpipe": __version__, "torch": str(torch.__version__)}
            run = {"step": step, "num_stages": member.num_ranks}
            values |= {"save": nonce, "about": {**versions, **run, **(member.cut or {})}}
            saving = Saving(member, Path(begun), keep)
            if asynchronous:
                saving.start(copied(values))  # 4
            else:
                saving.finish(agree, lambda: saving.write(values))  # 4, 5
            return saving
    raise TypeError("\n".join([*faults, CAN_BE]))


def _check(keep: int | None, step: int | None) -> None:
    if keep is not None and (isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep is {keep}, but must be at least 1: the newest is kept")
    # It becomes part of a name, by which load() must find it again.
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step is {step!r}, but must be an int of 0 or more")


def _judge(of_ranks: list[dict[str, Any]]) -> list[str]:
    """Check the calls of all ranks, on rank 0; return what cannot be saved."""
    asked_for = [facts["asked for"] for facts in of_ranks]
    for rank, other in enumerate(asked_for):
        if other != asked_for[0]:
            raise ValueError(
                f"state.save() was called with other arguments on rank {rank} than on rank 0: "
                f"with {other}; on rank 0 with {asked_for[0]}"
            )
    return of_all_ranks(of_ranks)


def _gather(
    member: Member,
    groups: Sequence[optimizers.Group],
    extra: extras.Extra | None,
    faults: list[str],
) -> dict[str, Any]:
    """Return what this rank saves, with the tensors in use; note what cannot be saved."""

    def own(what: str, values: dict[str, Any]) -> dict[str, Any]:
        share = member.own_share(values, in_shards=True).items()
        return {name: saved_form(f"{what}{name}", value, faults) for name, value in share}

    return {
        "model": own("model.", member.module.state_dict()),
        "optimizer": {
            "state": own("the optimizer's state of ", optimizers.state_of(groups, member.module)),
            "groups": saved_form("optimizer.groups", optimizers.saved_groups(groups), faults),
        },
        "extra": extras.saved_forms(extra, member.rank, faults),
        "generators": states_of_generators(member.device),
    }
