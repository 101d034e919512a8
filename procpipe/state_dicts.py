"""What a stage has of the model's values: a state dict of a part, and a record for saved state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from procpipe.run.calls import Calls
from procpipe.run.coordinator import Agree
from procpipe.torch_internals import pytree


@dataclass(frozen=True)
class StageRecord:
    """What ``procpipe.state`` needs to know of a stage, beside what an nn.Module has."""

    stage: int  # its number in its pipeline: the rank of replica 0 with the same layers
    cut: dict[str, list[int]]  # balance and placement, as plain JSON
    calls: Calls
    call: Callable[[str], AbstractContextManager[Agree]]  # makes a call of all ranks
    is_part: bool  # whether its pipeline is one of several, which may shard its layers
    keys: Any  # the attribute ``keys`` of the model that it was built from; None if there is none
    stand_in: Sequence[Tensor]  # what an optimizer has on a stage with nothing to train
    #: Of each parameter that other stages have, too, by its first name: the first of these stages.
    shared: Mapping[str, int]
    all_names: Sequence[tuple[str, ...]]  # of each tensor that several stages have


class PartOfStateDict(OrderedDict[str, Any]):
    """The state dict of a stage that is not the whole model.

    A file of it would look like a saved model and have a part of its values, so it cannot be
    pickled. Copies are of this class too; ``dict(…)`` of it is a plain dict.
    """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a state dict with the {len(self)} values of one stage alone cannot be pickled "
            "(torch.save, multiprocessing): the file would have a part of the model. On every "
            "rank, procpipe.state.save(folder, stage, optimizer) saves the run, and "
            "procpipe.state.export(folder, stage) the model's weights. To pickle this part alone, "
            "pickle dict(stage.state_dict())"
        )

    def __copy__(self) -> PartOfStateDict:
        copied = type(self)(self)
        vars(copied).update(vars(self))
        return copied

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> PartOfStateDict:
        copied = memo[id(self)] = type(self)()
        for key, value in self.items():
            copied[key] = copy.deepcopy(value, memo)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


# As OrderedDict is, so that tree_map() works.
pytree.register_pytree_node(
    PartOfStateDict,
    lambda values: (list(values.values()), list(values)),
    lambda values, keys: PartOfStateDict(zip(keys, values, strict=True)),
    serialized_type_name="procpipe.PartOfStateDict",
)
