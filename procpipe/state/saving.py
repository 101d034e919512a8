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
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from procpipe.state import extras, files, generators, groups, optimizers
from procpipe.state.background import Saving, check_open, wait_unfinished
from procpipe.state.member import Member, attempt, of_all_ranks
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
            learning rate scheduler or a :class:`Resumable`, by name; the same names on every rank.
            Numbers of NumPy are saved as those of Python.
        step: becomes part of the saved state's name; rank 0's counts.
        keep: how many saved states to leave in the folder, this one included; None for all.
        asynchronous: write in the background. The next save and the end of the script wait for it,
            and raise its error; a script whose last save fails ends with exit code 1.

    Returns:
        The save: its ``path``, and ``wait()`` for one in the background.

    Raises:
        OSError: the disk is full, or the folder is not shared by all ranks.
        RemoteStageError: another rank failed.
        StageClosedError: an earlier call has failed, or the stage was closed: nothing was saved.
        TypeError: lists, on every rank, what ``torch.load(weights_only=True)`` would not load on
            any rank; nothing was written, and the stage can still be used.
        ValueError: a parameter of the optimizer that is not the module's; other names in
            ``extra``, or other arguments, than on rank 0; a wrong ``keep`` or ``step``; a parameter
            that stages share with other options of the optimizer on each; ranks that disagree on
            the options of a group while a group has no parameter on some rank.

    Source: ``torch.distributed.checkpoint.save``.
    """
    member = Member.of(module)
    check_open(member, Path(folder).absolute())
    wait_unfinished(module)  # 1
    with member.call("state.save") as agree:
        member, agree = member.among(agree)
        faults: list[str] = []
        values, of_groups = _gather(member, optimizer, extra, faults)
        num_optimizers = len(values["optimizer"]["groups"])
        asked_for = [sorted(extra or ()), num_optimizers, bool(asynchronous)]
        wrong = _wrong(keep, step)
        facts = {"asked for": asked_for, "wrong": wrong, "groups": of_groups, "faults": faults}
        faults = agree(facts, _judge)  # 2
        if not faults:
            begun = None
            if member.rank == 0:  # 3
                begun = attempt(lambda: str(files.begin(Path(folder).absolute(), step)))
            path = Path(agree(begun, itemgetter(0)))
            values["save"] = agree(secrets.token_hex(8), itemgetter(0))
            versions = {"procpipe": __version__, "torch": str(torch.__version__)}
            run = {"step": step, "num_stages": member.num_ranks}
            values["about"] = {**versions, **run, **(member.cut or {})}
            saving = Saving(member, path, keep)
            if asynchronous:
                saving.start(copied(values))  # 4
            else:
                saving.finish(agree, lambda: saving.write(values))  # 4, 5
            return saving
    raise TypeError("\n".join([*faults, CAN_BE]))


def _wrong(keep: int | None, step: int | None) -> str:
    """Return what is wrong with these arguments, or ""."""
    if keep is not None and (isinstance(keep, bool) or keep < 1):
        return f"keep is {keep}, but must be at least 1: the newest is kept"
    # It becomes part of a name, by which load() must find it again.
    if step is not None and (type(step) is not int or step < 0):
        return f"step is {step!r}, but must be an int of 0 or more"
    return ""


def _judge(of_ranks: list[dict[str, Any]]) -> list[str]:
    """Check the calls of all ranks, on rank 0; return what cannot be saved."""
    ways = ("the names in extra", "the number of optimizers", "asynchronous")
    for rank, facts in enumerate(of_ranks):
        for way, one, other in zip(ways, of_ranks[0]["asked for"], facts["asked for"], strict=True):
            if one != other:
                raise ValueError(
                    f"state.save() was called with other arguments on rank {rank} than on rank 0: "
                    f"{way}: {other!r}, not {one!r}"
                )
    if conflicts := groups.match([facts["groups"] for facts in of_ranks])[1]:
        raise ValueError("\n".join(conflicts))
    if wrong := of_ranks[0]["wrong"]:
        raise ValueError(wrong)
    return of_all_ranks(of_ranks)


def _gather(
    member: Member,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    extra: extras.Extra | None,
    faults: list[str],
) -> tuple[dict[str, Any], list[groups.Fact]]:
    """Return what this rank saves, and the facts of its groups; note what cannot be saved.

    Tensors are those in use.
    """
    names = optimizers.Names(member.module, optimizer)
    state = optimizers.state_of(names)
    model = member.module.state_dict()
    own_state = {
        name: saved_form(f"the optimizer's state of {name}", values, faults)
        for name, values in member.own_share(state, in_shards=True).items()
    }
    own_model = {
        name: saved_form(f"model.{name}", value, faults)
        for name, value in member.own_share(model, in_shards=True).items()
    }
    found = optimizers.groups_of(names, state)
    options = saved_form("optimizer.param_groups", found, faults) or []
    to_save = optimizers.SavedOptimizers.of([{"state": {}, "groups": options}])
    values = {
        "save": "",
        "about": {},
        "model": own_model,
        "optimizer": {"state": own_state, "groups": options},
        "extra": extras.saved_forms(extra, member.rank, faults),
        "generators": generators.states(member.device),
    }
    return values, groups.facts_of(names, to_save) + groups.shared_facts(names, to_save)
