"""A process's layers of a cut model, under the full model's names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.build import Cut
from procpipe.compute.tied import Tied
from procpipe.job.grid import Grid
from procpipe.model.fixed import FixedLayers
from procpipe.notes import write_note
from procpipe.skip.skippable import declared
from procpipe.torch_internals import compile_in_place


class LocalLayers(FixedLayers):
    """A process's layers of a cut model, under the full model's names.

    What optimizers, state dicts and ``torch.compile`` need of them. Nothing here communicates.
    """

    _cut: Cut
    _grid: Grid
    _tied: Tied

    def _adopt(self, cut: Cut, tied: Tied, *, is_training: bool) -> None:
        """Register this stage's layers under their names in the full model, in its mode."""
        for name, layer in (item for part in cut.layers.values() for item in part.items()):
            if hasattr(self, name):
                raise ValueError(
                    f"a layer of the model is named {name!r}, which is also an attribute of "
                    "Stage: name the layer otherwise"
                )
            self.add_module(name, layer)
        self._cut = cut
        self._tied = tied
        # In a tuple, so that nn.Module does not register it.
        self._stand_in = (nn.Parameter(torch.empty(0, device=self.device)),)
        self._deferred = [m for m in self.modules() if isinstance(m, DeferredBatchNorm)]
        self.training = is_training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return this stage's parameters, for this process's optimizer.

        Where none of them requires a gradient, because the stage has no parameters or all are
        frozen, an empty one that does comes last: so no optimizer refuses what is left of them
        (``[p for p in stage.parameters() if p.requires_grad]``). It stands in for a parameter to
        train, has no elements and never a gradient, and is neither in ``named_parameters()`` nor
        in ``state_dict()``; ``procpipe.state`` passes over it.
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

        Of one that stages share that is its first name, on each of them.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        return self._tied.renamed(found, prefix) if remove_duplicate else found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this stage's part of a state dict of the full model, or of this stage alone.

        Entries of layers that other stages hold are passed over; with ``strict``, entries of no
        layer of the model are an error. Does not communicate.

        Raises:
            ValueError: ``assign`` is set, and layers of several stages share a parameter.
        """
        if assign:
            self._check_nothing_shared()
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

        Does not communicate; each rank compiles its own. Keys, parameters and results stay. Layers
        that stash or pop skip tensors are left as they are, which a note says. A backward in two
        tasks (``"zb-h1"``, ``"zb-v"``) runs whole in the first for compiled layers, which a note
        says, too. While a rank compiles, the ``timeout_s`` of others does not run, and stall
        reports name the layer.

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
                compile_in_place(layer, options)
        if left_out:
            write_note(
                f"procpipe: {self._grid.stage_name(self.rank)} leaves layers uncompiled that stash "
                f"or pop skip tensors: {', '.join(left_out)}"
            )

    def _check_nothing_shared(self) -> None:
        placement = self._cut.placement
        shared = [str(t) for t in self._cut.ties if len({placement[j] for j in t.partitions}) > 1]
        if shared:
            raise ValueError(
                "assign=True would give each layer a parameter of its own, but layers of several "
                f"stages share one: {'; '.join(shared)}: leave assign off"
            )

    def _by_partition(self) -> dict[int, nn.ModuleList]:
        """Return this stage's layers, as they are now, by the indices of its partitions."""
        return {
            j: nn.ModuleList(self._modules[name] for name in layers)
            for j, layers in self._cut.layers.items()
        }
