"""A process's layers of a cut model, under the full model's names; what they refuse, and why."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.build import Cut
from procpipe.compute.wrappers import refuse_data_parallel
from procpipe.job.grid import Grid
from procpipe.job.world import World
from procpipe.notes import write_note
from procpipe.skip.skippable import declared
from procpipe.torch_internals import compile_in_place, pytree


class LocalLayers(nn.Sequential):
    """A process's layers of a cut model, under the full model's names.

    What optimizers, state dicts and ``torch.compile`` need of them; they cannot be changed, copied
    or replicated. Nothing here communicates.
    """

    _grid: Grid
    _world: World

    def _adopt(self, cut: Cut, *, is_training: bool) -> None:
        """Register this stage's layers under their names in the full model, in its mode."""
        for layers in cut.layers.values():
            for name, layer in layers.items():
                self.add_module(name, layer)  # torch's KeyError if a Stage has such an attribute
        self._cut = cut
        self._tied = cut.tied
        # In a tuple, so that nn.Module does not register it.
        self._stand_in = (nn.Parameter(torch.empty(0, device=self._world.device)),)
        self._deferred = [m for m in self.modules() if isinstance(m, DeferredBatchNorm)]
        self.training = is_training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return this stage's parameters, for this process's optimizer.

        If none of them requires a gradient (the stage has no parameters, or all are frozen), an
        extra parameter that does comes last, because an optimizer refuses an empty list. It has no
        elements, never gets a gradient, and has no name.
        """
        is_trainable = False
        for parameter in super().parameters(recurse):
            is_trainable = is_trainable or parameter.requires_grad
            yield parameter
        if not is_trainable:
            stand_in = self._stand_in[0]
            stand_in.requires_grad = True  # stage.requires_grad_(False) froze it too
            yield stand_in

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this stage's parameters with the names under which the plain model lists them.

        A parameter that several stages share has its first name in the model on each of them.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        return self._tied.renamed(found, prefix) if remove_duplicate else found

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the values of this stage's layers, under the full model's keys.

        Unless the stage is the whole model, they are a part, which can be copied and loaded but not
        pickled: ``torch.save`` would write a part of a model. ``procpipe.state.save`` saves a run,
        ``procpipe.state.export`` a model's weights, and ``dict(stage.state_dict())`` can be
        pickled. Does not communicate.

        Args:
            args: as in torch, deprecated there: ``destination``, ``prefix``, ``keep_vars``.
            options: ``destination``, ``prefix`` and ``keep_vars``, as in torch. A ``destination``
                is returned itself, and can be pickled.

        Source: ``torch.nn.Module.state_dict``.
        """
        if self._cut.elsewhere and not args and options.get("destination") is None:
            part = PartOfStateDict()
            part._metadata = OrderedDict()  # type: ignore[attr-defined]
            options["destination"] = part
        return super().state_dict(*args, **options)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this stage's part of a state dict of the full model, or of this stage alone.

        Entries of layers that other stages hold are passed over; with ``strict``, entries of no
        layer of the model are an error. ``assign`` does not work where stages share parameters: the
        next training call is an error. Does not communicate.
        """
        ours = {
            key: value
            for key, value in state_dict.items()
            if key.split(".", 1)[0] not in self._cut.elsewhere
        }
        if (versions := getattr(state_dict, "_metadata", None)) is not None:
            ours = OrderedDict(ours)
            ours._metadata = versions  # type: ignore[attr-defined]
        loaded = super().load_state_dict(ours, strict, assign)
        self._tied.load(state_dict)
        return loaded

    def compile(self, **options: Any) -> None:
        """Compile each of this stage's layers in place, by ``torch.compile`` in their first steps.

        Does not communicate; each rank compiles its own. Keys, parameters and results stay the
        same. Layers that stash or pop skip tensors are not compiled. Where the schedule splits
        backward (``"zb-h1"``, ``"zb-v"``), compiled layers do all of it in the first task. In both
        cases a note is printed. While a rank compiles, the ``timeout_s`` of others does not run.

        Args:
            options: for ``torch.compile``: ``backend``, ``mode``, ``dynamic``, …

        Source: ``torch.nn.Module.compile``.
        """
        left_out = []
        for name, layer in self.named_children():
            if any(declared(layer)):
                # A generator, which torch would compile in pieces, anew for each micro-batch.
                left_out.append(f"{name!r} ({type(layer).__name__})")
            else:
                compile_in_place(layer, options, len(self))
        if left_out:
            write_note(
                f"procpipe: {self._grid.stage_name(self._world.rank)} leaves layers uncompiled "
                f"that stash or pop skip tensors: {', '.join(left_out)}"
            )

    def _parameters_by_partition(self) -> dict[int, list[nn.Parameter]]:
        return {
            j: [each for name in names for each in self.get_submodule(name).parameters()]
            for j, names in self._cut.layers.items()
        }

    # -- what is refused ------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return one of this stage's layers; of a slice, a plain ``nn.Sequential`` of them."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def _refuse_to_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "the layers of a Stage stay as they are: change the model before Stage(model, …), on "
            "every rank alike"
        )

    append = extend = insert = pop = _refuse_to_change
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_to_change

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse the subclass that torch's ``fully_shard`` and ``replicate`` make for a stage."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith("torch."):
            refuse_data_parallel("the Stage was given to fully_shard or replicate")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: a copy would not be connected to the other ranks."""
        raise TypeError(
            "a Stage cannot be copied or pickled, as it is one end of connected processes: copy "
            "its state_dict(), which has this stage's part of the model; save the run by "
            "procpipe.state.save(folder, stage, optimizer), or the model's weights by "
            "procpipe.state.export(folder, stage), on every rank"
        )


class PartOfStateDict(OrderedDict[str, Any]):
    """The state dict of a stage that is not the whole model, as are copies of it."""

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
        copied = memo[id(self)] = type(self)(copy.deepcopy(dict(self), memo))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


# As OrderedDict is, so that tree_map() works.
pytree.register_pytree_node(
    PartOfStateDict,
    lambda values: (list(values.values()), list(values)),
    lambda values, keys: PartOfStateDict(zip(keys, values, strict=True)),
    serialized_type_name="procpipe.PartOfStateDict",
)
