"""A state dict with one stage's part of the model's values: everything but pickling works."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NoReturn

from procpipe.torch_internals import pytree


class PartOfStateDict(OrderedDict[str, Any]):
    """The state dict of a stage that is not the whole model.

    A file of it would look like a saved model and have a part of its values, so it cannot be
    pickled. Copies are of this class too; ``dict(…)`` of it is a plain dict.
    """

    holder = "one stage"  # whose values these are, in words

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a state dict with the {len(self)} values of {self.holder} alone cannot be pickled "
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
