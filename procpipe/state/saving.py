"""``save``: what each rank does, in order.

1  wait for the save before this one, if it is still under way
2  rank 0 makes a draft's folder and sends its name to the others
3  each rank gathers its values; in the background, copies of them
4  each rank writes its part; rank 0 publishes the whole (background.py)
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from procpipe.errors import StageClosedError
from procpipe.state import extras, generators, groups, optimizers
from procpipe.state.archives import saved_copy
from procpipe.state.background import Saving, wait_unfinished
from procpipe.state.folders import Draft, find
from procpipe.state.member import Member
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

    Every rank calls it, between two steps. It returns once the whole saved state is on the disk
    under its name; or, in the background, once copies have been made in memory. A crash during a
    save leaves earlier saved states as they are.

    Saved are parameters and buffers, the optimizer's state and options, the random number
    generators of each rank, and ``extra``; not the gradients, so save after the optimizer's step.
    A saved state is a folder in the format of ``torch.distributed.checkpoint`` with the full
    model's keys: ``model.<name>``, ``optimizer.state.<name>.<part>``.

    Args:
        folder: the run's folder, on a file system that all ranks share; rank 0's counts.
        module: the stage; or any module, in a process of its own.
        optimizer: of this rank's parameters; or several.
        extra: plain values, and objects with ``state_dict()`` and ``load_state_dict()`` such as a
            learning rate scheduler or a :class:`Resumable`, by name; the same names on every rank.
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
        TypeError: something in ``extra`` that could not be loaded again.
        ValueError: a parameter of the optimizer that is not the module's; other names in
            ``extra``, or other arguments, than on rank 0; a wrong ``keep`` or ``step``; a parameter
            that stages share with other options of the optimizer on each; ranks that disagree on
            the options of a group while a group has no parameter on some rank.

    Source: ``torch.distributed.checkpoint.save``.
    """
    member = Member.of(module)
    _check_open(member, Path(folder).absolute())
    with member.call("state.save") as agree:
        wait_unfinished(module)  # 1
        member = member.among(agree)
        made: list[Draft] = []

        def make_draft(of_ranks: list[Any]) -> list[Any]:
            _check_alike([asked_for for asked_for, *_ in of_ranks])
            optimizers.check_shared([shared for _, shared, _ in of_ranks])
            sources, conflicts = groups.match([theirs for *_, theirs in of_ranks])
            if conflicts:
                raise ValueError("\n".join(conflicts))
            if keep is not None and (isinstance(keep, bool) or keep < 1):
                raise ValueError(f"keep is {keep}, but must be at least 1: the newest is kept")
            # It becomes part of a name, by which load() must find it again.
            if step is not None and (type(step) is not int or step < 0):
                raise ValueError(f"step is {step!r}, but must be an int of 0 or more")
            if member.pipeline > 0:
                return [sources, "", ""]
            draft = Draft(Path(folder).absolute(), step)
            made.append(draft)
            return [sources, str(draft.path), str(draft.final_path)]

        names = optimizers.Names(module, optimizer)
        asked_for = [sorted(extra or ()), len(names.optimizers), bool(asynchronous)]
        facts = [asked_for, optimizers.shared_options(names), groups.facts_of(names)]
        sources, *paths = agree(facts, make_draft)  # 2
        path, final_path = map(Path, json.loads(member.from_first(json.dumps(paths), agree)))
        saving = Saving(member, path, final_path, made[0] if made else None)
        try:
            places = {place for place, (rank, _) in sources.items() if rank == member.stage}
            values = _gather(member, names, places, extra, step)  # 3
            if asynchronous or member.num_pipelines > 1:  # only a folder is common to pipelines
                saving.start(_copied(values) if asynchronous else values, keep)  # 4
            else:
                saving._write(values)  # 4
                agree(None, lambda _: saving._publish(keep))
                saving._let_go()
        except BaseException:
            saving._let_go()
            raise
    if not asynchronous:
        saving.wait()
    return saving


def _check_open(member: Member, folder: Path) -> None:
    """Check that calls can still be made; does not communicate."""
    if member.calls is None or not (why := member.calls.ended):
        return
    newest = find(folder)
    there = (
        "there is no saved state" if newest is None else f"the newest saved state is {newest.path}"
    )
    raise StageClosedError(
        f"nothing was saved in {folder}, where {there}: state.save() cannot run, because {why}"
    )


def _check_alike(asked_for: list[Any]) -> None:
    """Check, on rank 0, that all ranks save the same things in the same way."""
    ways = ("the names in extra", "the number of optimizers", "asynchronous")
    for rank, theirs in enumerate(asked_for):
        for way, one, other in zip(ways, asked_for[0], theirs, strict=True):
            if one != other:
                raise ValueError(
                    f"state.save() was called with other arguments on rank {rank} than on rank 0: "
                    f"{way}: {other!r}, not {one!r}"
                )


def _gather(
    member: Member,
    names: optimizers.Names,
    places: set[str],
    extra: extras.Extra | None,
    step: int | None,
) -> dict[str, Any]:
    """Return what this rank saves, by key: tensors that are in use, and copies of other values.

    ``places`` are those of the groups whose options this stage saves.
    """
    values = {f"model.{key}": value for key, value in member.module.state_dict().items()}
    values |= optimizers.values_of(names) | groups.options_to_save(names, places)
    values = member.own_share(values)
    own = f"ranks.{member.rank}."
    for name, state in generators.states(member.device).items():
        values[f"{own}generators.{name}"] = state
    for key, value in values.items():
        if not isinstance(value, (Tensor, bool, int, float, str)):
            values[key] = saved_copy(key, value)
    values |= extras.snapshot(extra, member.rank)
    if member.rank == 0:
        about = {"procpipe": __version__, "torch": str(torch.__version__), "step": step}
        cut = {"num_stages": member.num_ranks, **(member.cut or {})}
        values["procpipe"] = json.dumps(about | cut)
    return values


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with copies of the tensors in this process's memory."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }
