"""What a training script does with a model's gradients, in plain torch; alike for both models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from tests.fuzz.case import Case

MAX_NORM = 0.1

#: Options that a scheduler changes, or that differ between groups.
OPTIONS = ("lr", "initial_lr", "weight_decay", "momentum", "betas")

#: Options of the groups: of other parameters, of those that do not decay, of the head.
GROUPS = ({"lr": 0.05, "weight_decay": 0.1}, {"weight_decay": 0.0}, {"lr": 0.02})


def grad_mode_of(act: str) -> AbstractContextManager[Any]:
    """Return the mode of autograd in which an act is done."""
    if act == "output in inference mode":
        return torch.inference_mode()
    return torch.set_grad_enabled("without grad" not in act)


class Training:
    """The optimizer, learning rate scheduler and scaler of a model.

    Args:
        module: the plain model, or a stage.
        case: says which.
        clip: of the gradients, by a type of norm; returns their norm.
        connect: is called with the scaler, if there is one.
        is_new: whether nothing is to be loaded; if not, all begin with other options.
    """

    def __init__(
        self,
        module: nn.Module,
        case: Case,
        clip: Callable[[float], Tensor],
        connect: Callable[[GradScaler], Any] | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        self.module = module
        self._clip = clip
        self.optimizer = _optimizer(module, case, factor=1.0 if is_new else 3.0)
        self.scheduler: LRScheduler | None = None
        if case.scheduler == "steps":
            self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)
        elif case.scheduler == "cycle":
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.scheduler = OneCycleLR(self.optimizer, rates, total_steps=20)
        self.scaler: GradScaler | None = None
        if case.scale:
            scale = case.scale if is_new else 2.0
            self.scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
            if connect is not None:
                connect(self.scaler)
        self._is_unscaled = False

    @property
    def state(self) -> dict[str, Any]:
        """What is saved beside the model and the optimizer."""
        both = {"scheduler": self.scheduler, "scaler": self.scaler}
        return {name: value for name, value in both.items() if value is not None}

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        return self.scaler.get_scale() if self.scaler else 1.0

    def options(self) -> list[dict[str, Any]]:
        """Return options of all groups of parameters, also of those without a member here."""
        return [
            {name: group[name] for name in OPTIONS if name in group}
            for group in self.optimizer.param_groups
        ]

    def renew_scaler(self) -> None:
        """Replace the scaler by a new one in the same state."""
        if self.scaler is not None:
            state = self.scaler.state_dict()
            self.scaler = GradScaler("cpu")
            self.scaler.load_state_dict(state)
            self.scaled(torch.ones(()))  # torch makes the tensor of the scale in the first call
        self._is_unscaled = False

    def scaled(self, loss: Any) -> Any:
        """Multiply a loss by the scale."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def do(self, act: str, what: Any = None) -> Tensor | None:
        """Do what a script does between mini-batches; return the norm of "clip".

        ``what`` is the type of that norm, or the name of the parameter of which "overflow" sets a
        gradient's value to inf.
        """
        if act == "update":
            self._update()
        elif act == "clip":
            if self.scaler is not None and not self._is_unscaled:
                self.scaler.unscale_(self.optimizer)
                self._is_unscaled = True
            return self._clip(what)
        elif act == "overflow":
            parameter = dict(self.module.named_parameters()).get(what)
            if self._is_unscaled:
                pass  # the scaler has looked for an inf already
            elif parameter is not None and parameter.grad is not None:
                parameter.grad[(0,) * parameter.dim()] = torch.inf
        else:
            self.module.zero_grad(set_to_none=act == "zero")
        return None

    def _update(self) -> None:
        """Let optimizer and scheduler do a step; the scaler may leave out that of the first."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self._is_unscaled = False
        if self.scheduler is not None:
            self.scheduler.step()


def _optimizer(module: nn.Module, case: Case, *, factor: float) -> Optimizer:
    head = f"{len(case.layers)}."
    members: list[list[Tensor]] = [[], [], []]
    for name, parameter in module.named_parameters():
        if case.groups in ("head", "both") and name.startswith(head):
            members[2].append(parameter)
        else:
            is_second = case.groups in ("decay", "both") and parameter.dim() < 2
            members[is_second].append(parameter)
    used = {"one": (0,), "decay": (0, 1), "head": (0, 2), "both": (0, 1, 2)}[case.groups]
    groups: list[dict[str, Any]] = []
    for k in used:
        options = GROUPS[0] | GROUPS[k]
        options = {name: value * factor for name, value in options.items()}
        groups.append({"params": members[k], **options})
    if case.optimizer == "adamw":  # a small eps would enlarge gradients that are only rounding
        return AdamW(groups, eps=0.1)
    return SGD(groups, momentum=0.9)
