"""Runs cases on the ranks of a pool: each call on the stage and on the plain model, then compared.

After each call it compares the loss, the output, every gradient, parameter and buffer of the
stage, the inputs' gradients, and at the end how often hooks ran. Every bit must be equal where
additions are in the same order and factors are laid out alike (``Case.is_exact``); otherwise the
tolerance is 1e-12 of the largest number compared, or 1e-10 behind norms, which divide rounding
errors by small deviations.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz_cases import PAIRS, Case
from benchmarks.fuzz_layers import build
from benchmarks.fuzz_plain import Batch, Plain, loss_fn_of, loss_weight_of, own_loss
from procpipe import RemoteStageError, Stage, is_recomputing
from tests.dist.stages import assert_same, stage_of, two_at_a_time
from tests.dist.worker import BareWorld

#: Parts of the largest number compared, where not every bit is equal: in general; behind norms.
TOLERANCE, TOLERANCE_OF_NORMS = 1e-12, 1e-10

#: Smaller numbers count as this: a gradient through two norms may be rounding only.
FLOOR = 1e-2


def run_cases(bare: BareWorld, cases: Iterable[Case]) -> list[str | None]:
    """Run cases one after another on each rank; return the fault of each, or None.

    The story is empty if another rank failed.
    """
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # at a model's first layer
    stories: list[str | None] = []
    for number, case in enumerate(cases):
        stories.append(None)
        try:
            run_case(bare, f"case {number}", case)
        except RemoteStageError:
            stories[-1] = ""
        except Exception as error:
            stories[-1] = "\n".join([f"{type(error).__name__}: {error}", *_notes(error)])
    return stories


def run_case(bare: BareWorld, name: str, case: Case, *, truth: Case | None = None) -> None:
    """Run one case; a difference raises an ``AssertionError``, other errors are passed on.

    Args:
        bare: this rank.
        name: of the case, another for each.
        case: what is run.
        truth: what the plain model runs; a different case shows that the comparison can fail.
    """
    model = build(case)
    options: dict[str, Any] = {
        "chunks": case.chunks,
        "checkpoint": case.checkpoint,
        "schedule": two_at_a_time if case.schedule == PAIRS else case.schedule,
        "transport": case.transport,
        "loss_fn": loss_fn_of(case),
        "loss_weight": loss_weight_of(case),
        "deferred_batch_norm": case.is_deferred,
    }
    with stage_of(bare, name, model, case.balance, **options) as stage:
        comparison = _Comparison(stage, Plain(model, truth or case), case)
        for number, call in enumerate(case.calls):
            act, _, argument = call.partition(":")
            try:
                comparison.call(act, int(argument or 0), number)
            except Exception as error:
                error.add_note(f"in call {number}, {call}, on rank {bare.rank}")
                raise
        comparison.compare_hooks()


def _tolerance(case: Case) -> float:
    if case.is_exact:
        return 0.0
    return TOLERANCE_OF_NORMS if "norm" in case.layers else TOLERANCE


class _Comparison:
    """One case on one rank: its stage, and the plain model beside it."""

    def __init__(self, stage: Stage, plain: Plain, case: Case) -> None:
        self._stage, self._plain, self._case = stage, plain, case
        self._both: tuple[nn.Module, nn.Module] = stage, plain.model
        optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, momentum=0.9)
        if case.optimizer == "adamw":  # a small eps would enlarge gradients that are only rounding
            optimizer = partial(torch.optim.AdamW, eps=0.1)
        self._optimizers = [optimizer(module.parameters(), lr=0.05) for module in self._both]
        self._tolerance = _tolerance(case)
        self._counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        if case.has_hooks:
            for module, counts in zip(self._both, self._counts, strict=True):
                _hook(case, module, counts)

    def call(self, act: str, argument: int, number: int) -> None:
        """Run one call on both and compare."""
        stage = self._stage
        if act == "chunks":
            stage.chunks = argument
        elif act in ("update", "clip", "zero", "zero to zeros"):
            self._between(act)
        else:
            self._mini_batch(act, Batch.of(self._case, number, argument))
            self._compare_state()

    def _between(self, act: str) -> None:
        if act == "update":
            for optimizer in self._optimizers:
                optimizer.step()
            self._compare_state()
        elif act == "clip":
            gradients = [p for p in self._plain.model.parameters() if p.grad is not None]
            expected = nn.utils.clip_grad_norm_(gradients, 0.1)
            found = self._stage.clip_grad_norm_(0.1)
            if gradients:
                self._compare(found, expected, "norm", tolerance=self._tolerance or TOLERANCE)
        else:
            for module in self._both:
                module.zero_grad(set_to_none=act == "zero")

    def _mini_batch(self, act: str, batch: Batch) -> None:
        stage, plain, chunks = self._stage, self._plain, self._stage.chunks
        if act in ("evaluate", "output in eval"):
            for module in self._both:
                module.eval()
        with torch.set_grad_enabled("without grad" not in act):
            if act.startswith("output"):
                found = stage.fetch(stage(*batch.inputs))
                self._compare(found, plain.output(batch, chunks), "output")
            elif act.startswith("loss"):
                self._loss(batch, chunks, has_gradients=act == "loss for inputs")
            else:
                self._step(act, batch, chunks)
        for module in self._both:
            module.train()

    def _step(self, act: str, batch: Batch, chunks: int) -> None:
        stage, inputs, target = self._stage, batch.inputs, batch.target
        has_one = len(inputs) == 1
        if act == "step for inputs":
            self._require_gradients(batch)
        if act == "batches" and has_one and target is not None:
            (found,) = [stage.step(*item) for item in stage.batches([(*inputs, target)])]
        elif act == "step on rank 0" and stage.rank != 0:
            found = stage.step()
        elif act == "step with last target" and stage.rank != stage.placement[-1]:
            found = stage.step(*inputs, target=None)
        elif has_one and act != "step named":
            found = stage.step(*inputs, *([] if target is None else [target]))
        else:
            found = stage.step(*inputs, target=target)
        self._check_nothing_held()
        ours = self._take_gradients(batch)
        self._compare(found, self._plain.step(batch, chunks), "loss")
        self._compare_gradients_of_inputs(ours, batch)

    def _loss(self, batch: Batch, chunks: int, *, has_gradients: bool) -> None:
        stage = self._stage
        if has_gradients:
            self._require_gradients(batch)
        output = stage(*batch.inputs)
        loss = own_loss(self._case, output, batch.target)
        loss.backward()
        self._check_nothing_held()
        ours = self._take_gradients(batch)
        expected_output, expected = self._plain.loss(batch, chunks)
        self._compare(stage.fetch(loss), expected, "loss")
        self._compare(stage.fetch(output), expected_output, "output")
        self._compare_gradients_of_inputs(ours, batch)

    # -- gradients of the inputs ----------------------------------------------------------------

    def _require_gradients(self, batch: Batch) -> None:
        for tensor in _floats(batch.inputs):
            tensor.requires_grad_()

    def _take_gradients(self, batch: Batch) -> list[Tensor | None]:
        taken = [tensor.grad for tensor in _floats(batch.inputs)]
        for tensor in _floats(batch.inputs):
            tensor.grad = None
        return taken

    def _compare_gradients_of_inputs(self, ours: list[Tensor | None], batch: Batch) -> None:
        if self._stage.rank == 0:
            expected = [tensor.grad for tensor in _floats(batch.inputs)]
            self._compare(ours, expected, "gradient of the input")

    def _check_nothing_held(self) -> None:
        held = self._stage.statistics().held_bytes
        assert held == 0, f"{held} bytes are held after the call"

    # -- comparing ------------------------------------------------------------------------------

    def compare_hooks(self) -> None:
        """Compare how often each hook ran; the plain model has those of all stages."""
        ours, expected = self._counts
        names = dict(self._stage.named_modules()) | dict(self._stage.named_parameters())
        expected = Counter({key: n for key, n in expected.items() if key.split(" ")[0] in names})
        assert ours == expected, f"hooks ran {ours - expected} too often, {expected - ours} too few"

    def _compare_state(self) -> None:
        stage, plain = self._stage, self._plain.model
        expected = {name: p.grad for name, p in plain.named_parameters()}
        found = {name: p.grad for name, p in stage.named_parameters()}
        ours = {name: expected[name] for name in found}
        self._compare(found, ours, "gradients", scale=_largest(expected))
        state = plain.state_dict()
        found = dict(stage.state_dict())
        self._compare(found, {key: state[key] for key in found}, "state")

    def _compare(
        self,
        found: Any,
        expected: Any,
        what: str,
        *,
        scale: float | None = None,
        tolerance: float | None = None,
    ) -> None:
        tolerance = self._tolerance if tolerance is None else tolerance
        scale = _largest(expected) if scale is None else scale
        assert_same(found, expected, what, tolerance, max(scale, FLOOR))


def _hook(case: Case, module: nn.Module, counts: Counter[str]) -> None:
    """Count what runs on a model's modules and parameters; some hooks change gradients."""

    def count(name: str, what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if what != "forward" or not is_recomputing():
                counts[f"{name} {what}"] += 1

        return hook

    words = [*(word.rstrip("*") for word in case.words), "head"]
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and name.endswith("f"):
            child.register_forward_hook(count(name, "forward"))
            if words[int(name.split(".")[0])] in ("linear", "twice", "tuple", "custom", "head"):
                child.register_full_backward_hook(count(name, "backward"))
    for name, parameter in module.named_parameters():
        # A weight that is also passed on is added up in both tasks of a split backward pass.
        if parameter.requires_grad and words[int(name.split(".")[0])] != "weight":
            parameter.register_post_accumulate_grad_hook(count(name, "accumulated"))
            if len(name) % 2:
                parameter.register_hook(lambda gradient: gradient * 0.5)


def _floats(value: Any) -> list[Tensor]:
    """List the floating tensors of positional inputs that are split."""
    if isinstance(value, tuple):
        return [tensor for child in value for tensor in _floats(child)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def _largest(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.double().abs().max().item() if value.numel() else 0.0
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, (tuple, list, dict)):
        return max(map(_largest, children), default=0.0)
    return 0.0


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))
