"""Counts how often hooks run on the modules and parameters of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from procpipe import is_recomputing
from tests.fuzz.case import Case, Run

#: Layers whose linear module gets a hook of its backward pass.
WITH_BACKWARD = ("linear", "twice", "tuple", "custom", "head")


class Hooks:
    """Hooks on the modules and parameters of one model; some of them change gradients.

    Args:
        case: has which layers.
        run: has one replica or several.
        model: a stage, or the plain model.
        plain: the plain model.
    """

    def __init__(self, case: Case, run: Run, model: nn.Module, plain: nn.Module) -> None:
        self._words = [*case.kinds, "head"]
        self._handles: list[Any] = []
        # What layers or replicas share has a part of its gradient at a time.
        names = Counter(id(p) for _, p in plain.named_parameters(remove_duplicate=False))
        self._shared = {name for name, p in plain.named_parameters() if names[id(p)] > 1}
        self._is_alone = run.replicas == 1
        self.counts = self._registered(model) if case.has_hooks else Counter()

    def remove(self) -> Counter[str]:
        """Remove the hooks; return how often each ran, by the name of what it was on."""
        for handle in self._handles:
            handle.remove()
        return self.counts

    def _registered(self, module: nn.Module) -> Counter[str]:
        counts: Counter[str] = Counter()

        def count(name: str, what: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if what != "forward" or not is_recomputing():
                    counts[f"{name} {what}"] += 1

            return hook

        found = self._handles
        for name, child in module.named_modules():
            if isinstance(child, nn.Linear) and name.endswith("f"):
                found.append(child.register_forward_hook(count(name, "forward")))
                if self._word(name) in WITH_BACKWARD:
                    hook = count(name, "backward")
                    found.append(child.register_full_backward_hook(hook))
        for name, parameter in module.named_parameters():
            # A weight that is also passed on is added up in both tasks of a split backward pass,
            # and one of a layer that recomputes it twice perhaps at once.
            is_part = self._word(name) in ("weight", "reentrant")
            is_one = name not in self._shared and not is_part
            if parameter.requires_grad and is_one:
                if self._is_alone:  # as above
                    hook = count(name, "accumulated")
                    found.append(parameter.register_post_accumulate_grad_hook(hook))
                if len(name) % 2:
                    found.append(parameter.register_hook(lambda gradient: gradient * 0.5))
        return counts

    def _word(self, name: str) -> str:
        return self._words[int(name.split(".", maxsplit=1)[0])]
