"""Runs cases on the ranks of a pool: each call on the stage and on the oracle, then compared.

After each call it compares the loss, the output, every gradient, parameter and buffer of the
stage, the inputs' gradients, options of the optimizer, and at the end how often hooks ran. Every
bit must be equal where additions are in the same order and factors are laid out alike
(``Case.is_exact``); otherwise the tolerance is 1e-12 of the largest number compared, or 1e-10
behind norms, which divide rounding errors by small deviations.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, compress
from operator import and_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from procpipe import Stage, state
from tests.dist.stages import assert_same, num_held
from tests.dist.worker import BareWorld
from tests.fuzz.case import BETWEEN, LOOPS, Call, Case, Run, is_training
from tests.fuzz.data import Batch, mapped, own_loss
from tests.fuzz.hooks import Hooks
from tests.fuzz.oracle import SEVERAL, TOTAL, Expected, Oracle
from tests.fuzz.pipeline import as_passed, stage_for
from tests.fuzz.training import MAX_NORM, Training, grad_mode_of

#: Parts of the largest number compared, where not every bit is equal: in general; behind norms.
TOLERANCE, TOLERANCE_OF_NORMS = 1e-12, 1e-10

#: Smaller numbers count as this, gradients times the scale of a ``GradScaler``: a gradient through
#: two norms may be rounding only.
FLOOR = 1e-2

#: Warnings that cases are expected to give.
EXPECTED = (
    "Full backward hook is firing",  # at a model's first layer
    "Detected call of `lr_scheduler.step\\(\\)`",  # a scaler has left out the first update
    "loss_weight is 0 for every micro-batch",
    "None of the inputs have requires_grad=True",  # of a layer that recomputes for itself
)

#: A call's act, the mini-batch of each replica, and what the stage is given.
_OneCall = Callable[[str, list[Batch], Batch], Any]


def run_one(
    bare: BareWorld,
    case: Case,
    r: int,
    folder: str,
    drawn: Sequence[Sequence[float]] = (),
    truth: Case | None = None,
) -> list[float]:
    """Do run ``r`` of a case; a difference is an ``AssertionError``, other errors are passed on.

    Args:
        bare: this rank.
        case: what is run.
        r: which run; the oracle repeats those before it.
        folder: for saved state.
        drawn: what each rank of the run before this has returned.
        truth: what the oracle runs; a different case shows that the comparison can fail.

    Returns:
        Random numbers that were drawn after the end of the run.
    """
    torch.set_default_dtype(torch.float64)
    for message in EXPECTED:
        warnings.filterwarnings("ignore", message)
    truth = truth or case
    oracle = Oracle(truth)
    for k, run in enumerate(case.runs[:r]):
        oracle.begin(truth.runs[k])
        hooks = Hooks(case, run, oracle.model, oracle.model)
        for number, call in _calls_of(run, oracle):
            _expect(oracle, case, run, call, 10 * k + number)
        hooks.remove()
    run = case.runs[r]
    oracle.begin(truth.runs[r])
    hooks = Hooks(case, run, oracle.model, oracle.model)
    with stage_for(bare, case, run, is_new=r == 0) as stage:
        comparison = Comparison(stage, oracle, case, run, is_new=r == 0)
        if r > 0:
            comparison.load(folder, r, drawn)
        for number, call in _calls_of(run, oracle):
            try:
                comparison.call(call, 10 * r + number)
            except Exception as error:
                error.add_note(f"in call {number}, {call}, of run {r} on rank {bare.rank}")
                raise
        comparison.compare_hooks(hooks.remove())
        if r < len(case.runs) - 1:
            comparison.save(folder, r)
        return _draw_numbers()


def _calls_of(run: Run, oracle: Oracle) -> Iterator[tuple[int, Call]]:
    """Yield a run's calls with their numbers, until training diverges: roundings grow, too."""
    for number, call in enumerate(run.calls):
        if oracle.has_diverged():
            return
        yield number, call


def _expect(oracle: Oracle, case: Case, run: Run, call: Call, number: int) -> None:
    """Do a call on the oracle alone."""
    act, numbers = call
    if act not in BETWEEN:
        for shares in _common(act, _rounds(case, run, numbers, number)):
            oracle.call(act, shares)
    elif act == "chunks" or act.startswith("zero") or oracle.has_gradients():
        oracle.between(act, numbers)


def _rounds(case: Case, run: Run, sizes: tuple[Any, ...], number: int) -> list[list[Batch]]:
    """Return the mini-batches of a call, each a share for each replica."""
    return [
        [Batch.of(case, 10 * number + k, r, size) for r, size in enumerate(of_replicas)]
        for k, of_replicas in enumerate(run.rounds(sizes))
    ]


def _common(act: str, rounds: list[list[Batch]]) -> list[list[Batch]]:
    """Return the mini-batches that all replicas have: none in eval mode, else up to the first end.

    In eval mode no replica changes anything that another one has.
    """
    is_whole = [is_training(act) and all(batch.num_samples for batch in r) for r in rounds]
    return [*compress(rounds, accumulate(is_whole, and_))]


class Comparison:
    """One run on one rank: its stage, and the oracle beside it."""

    def __init__(self, stage: Stage, oracle: Oracle, case: Case, run: Run, *, is_new: bool) -> None:
        self._stage, self._oracle, self._case, self._run = stage, oracle, case, run
        self._num_stages = max(stage.placement) + 1
        self._training = Training(
            stage, case, partial(stage.clip_grad_norm_, MAX_NORM), stage.scaler, is_new=is_new
        )
        self._is_synced = True
        self._evaluated: tuple[float, Tensor] = (0.0, torch.zeros(()))  # loss and weight, summed
        self._tolerance = TOLERANCE_OF_NORMS if "norm" in str(case.layers) else TOLERANCE
        if case.is_exact:
            self._tolerance = 0.0
        self._hooks = Hooks(case, run, stage, oracle.model)

    def save(self, folder: str, r: int) -> None:
        """Save the run for the next one; also what is not an object with a state."""
        extra = {**self._training.state, "progress": {"run": r, "losses": [0.5, None]}}
        state.save(folder, self._stage, self._training.optimizer, extra=extra, step=r)

    def load(self, folder: str, r: int, drawn: Sequence[Sequence[float]]) -> None:
        """Resume what the run before this has saved; ``drawn`` are numbers drawn after that."""
        extra = {**self._training.state, "progress": {}}
        saved = state.load(folder, self._stage, self._training.optimizer, extra=extra)
        assert saved is not None
        assert saved.step == r - 1, saved
        assert extra["progress"] == {"run": r - 1, "losses": [0.5, None]}, extra
        if self._stage.rank == 0 or len(drawn) == self._run.num_ranks:
            now, before = _draw_numbers(), drawn[self._stage.rank]
            assert now == before, f"random numbers after loading: {now}, not {before}"
        self._compare_state()

    def call(self, call: Call, number: int) -> None:
        """Run one call on both and compare; ``number`` makes its data differ from others'."""
        act, numbers = call
        if act not in BETWEEN:
            self._stage.train(is_training(act))
            with grad_mode_of(act):
                self._mini_batches(act, _rounds(self._case, self._run, numbers, number))
        elif act == "chunks":
            (self._stage.chunks,) = numbers
            self._oracle.between(act, numbers)
        elif act.startswith("zero") or self._oracle.has_gradients():  # else a scaler would refuse
            what = self._oracle.what_of(act, numbers)
            found, expected = self._training.do(act, what), self._oracle.between(act, numbers)
            self._compare(found, expected, "norm", tolerance=self._tolerance or TOLERANCE)
        self._compare_state()

    def _mini_batches(self, act: str, rounds: list[list[Batch]]) -> None:
        kinds: dict[str, _OneCall] = {"output": self._output, "loss": self._own_loss}
        call = kinds.get(act.split(" ", maxsplit=1)[0], self._step)
        ours = [batch for batch in map(self._own, rounds) if batch.num_samples]
        shares = _common(act, rounds) if is_training(act) else [[batch] for batch in ours]
        if act in LOOPS:
            self._loop(act, ours, shares, call)
        else:
            call(act, shares[0], as_passed(ours[0]))
        if act.startswith("evaluate"):
            self._compare_sum(act, rounds)

    def _output(self, act: str, shares: list[Batch], passed: Batch) -> None:
        found = self._stage.fetch(self._stage(*passed.inputs, **passed.named))
        self._compare(found, self._own(self._oracle.call(act, shares).outputs), "output")

    def _loop(self, act: str, ours: list[Batch], rounds: list[list[Batch]], call: _OneCall) -> None:
        """Do a call in a loop over this replica's loader, which may have more than all have."""
        loader = [_item(batch, is_own=act.startswith("loss")) for batch in ours]
        may_be_same = self._case.inputs == "ids"  # few integers, which replicas may draw alike
        items = self._stage.batches(loader if self._is_first else None, same_data=may_be_same)
        for shares, item in zip(rounds, items, strict=True):
            call(act, shares, _from_item(item, has_target=shares[0].target is not None))

    def _compare_sum(self, act: str, rounds: list[list[Batch]]) -> None:
        """Compare a loss that is added up over all replicas, and what it counts."""
        found = [self._stage.sum_over_replicas(number) for number in self._evaluated]
        self._evaluated = (0.0, torch.zeros(()))
        if self._run.replicas == 1:
            return
        each = [self._oracle.call(act, [batch]) for r in rounds for batch in r if batch.num_samples]
        weight = torch.tensor(sum(one.weight for one in each))
        loss = sum(one.loss.item() * one.weight for one in each if one.loss is not None)
        self._compare([torch.tensor(found[0]), found[1]], [torch.tensor(loss), weight], "sum")

    @property
    def _is_last(self) -> bool:
        """Whether this rank has the output of its replica."""
        return self._stage.rank % self._num_stages == self._stage.placement[-1]

    @property
    def _is_first(self) -> bool:
        """Whether this is the first rank of its replica."""
        return self._stage.rank % self._num_stages == 0

    def _own(self, of_replicas: list[Any]) -> Any:
        """Return what is of this rank's replica, of one for each, or of it alone."""
        return of_replicas[self._stage.replica if len(of_replicas) > 1 else 0]

    def _step(self, act: str, shares: list[Batch], passed: Batch) -> None:
        stage = self._stage
        inputs, named, target = passed.inputs, passed.named, passed.target
        if act == "step for inputs":
            self._own(shares).require_gradients()
        options: dict[str, Any] = {}
        if act == "step with total":
            options["total_weight"] = TOTAL
        elif act == "step of several":
            options["accumulate"] = SEVERAL
        with stage.no_sync() if act == "step unsynced" else nullcontext():
            if act == "step on rank 0" and not self._is_first:
                found = stage.step()
            elif act == "step with last target" and not self._is_last:
                found = stage.step(*inputs, target=None, **named)
            elif len(inputs) == 1 and not named and act != "step named":
                found = stage.step(*inputs, *([] if target is None else [target]), **options)
            else:
                found = stage.step(*inputs, target=target, **named, **options)
        if is_training(act):
            self._is_synced = act != "step unsynced" or stage.replicas == 1
        expected = self._compare_call(act, shares, found)
        weight = torch.tensor(expected.weight, dtype=torch.float64)
        self._compare(stage.last_weight, weight, "weight", tolerance=TOLERANCE)
        if not is_training(act):
            loss, count = self._evaluated
            self._evaluated = loss + found.item() * weight.item(), count + stage.last_weight

    def _own_loss(self, act: str, shares: list[Batch], passed: Batch) -> None:
        if act == "loss for inputs":
            self._own(shares).require_gradients()
        output = self._stage(*passed.inputs, **passed.named)
        target = mapped(lambda tensor: tensor.to(self._stage.device), passed.target)
        loss = own_loss(self._case, output, target)
        self._training.scaled(loss).backward()
        self._compare_call(act, shares, loss, output)

    def _compare_call(
        self, act: str, shares: list[Batch], loss: Any, output: Any = None
    ) -> Expected:
        """Do a call on the oracle, after that on the stage, and compare what both give."""
        stage = self._stage
        assert num_held(stage) == 0, "something is held after the call"
        own = self._own(shares).take_gradients()
        expected = self._oracle.call(act, shares)
        if output is not None:
            loss = stage.fetch(loss)
            self._compare(stage.fetch(output), self._own(expected.outputs), "output")
        self._compare(loss, expected.loss if output is None else self._own(expected.losses), "loss")
        if self._is_first:
            theirs = self._own(expected.gradients)
            self._compare(own, theirs, "gradient of the input", self._least(theirs))
        return expected

    # -- comparing ------------------------------------------------------------------------------

    def compare_hooks(self, expected: Counter[str]) -> None:
        """Compare how often each hook ran; the plain model has those of all stages and replicas."""
        ours = self._hooks.remove()
        names = dict(self._stage.named_modules()) | dict(self._stage.named_parameters())
        expected = Counter({key: n for key, n in expected.items() if key.split(" ")[0] in names})
        assert self._run.replicas > 1 or ours == expected, (
            f"hooks ran {ours - expected} too often, {expected - ours} too few"
        )

    def _compare_state(self) -> None:
        stage, plain = self._stage, self._oracle.model
        expected = {name: p.grad for name, p in plain.named_parameters()}
        if self._is_synced:
            found = {name: p.grad for name, p in stage.named_parameters()}
            ours = {name: expected[name] for name in found}
            self._compare(found, ours, "gradients", self._least(expected))
        state = plain.state_dict()
        found = dict(stage.state_dict())
        self._compare(found, {key: state[key] for key in found}, "state")
        ours_and_theirs = self._training, self._oracle.training
        options, expected_options = (training.options() for training in ours_and_theirs)
        assert options == expected_options, f"options of groups: {options}, not {expected_options}"
        scale, expected_scale = (training.scale for training in ours_and_theirs)
        assert scale == expected_scale, f"scale: {scale}, not {expected_scale}"

    def _least(self, gradients: Any) -> float:
        """Return what a difference between gradients is measured by."""
        return max(_largest(gradients), FLOOR * self._oracle.training.scale)

    def _compare(
        self,
        found: Any,
        expected: Any,
        what: str,
        scale: float | None = None,
        *,
        tolerance: float | None = None,
    ) -> None:
        """Compare by a part of ``scale``, by default of the largest number expected."""
        tolerance = self._tolerance if tolerance is None else tolerance
        scale = max(_largest(expected), FLOOR) if scale is None else scale
        found, expected = mapped(_finite, found), mapped(_finite, expected)
        assert_same(found, expected, what, tolerance, scale)


def _draw_numbers() -> list[float]:
    """Draw a number from each global generator."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def _item(batch: Batch, *, is_own: bool) -> Any:
    """Return a mini-batch as an item of a loader; ``is_own``: its target is for an own loss."""
    passed = as_passed(batch, torch.clone) if is_own else as_passed(batch)
    target = passed.target
    if passed.named:
        return passed.named | ({} if target is None else {"target": target})
    return passed.inputs if target is None else (*passed.inputs, target)


def _from_item(item: Any, *, has_target: bool) -> Batch:
    """Return what ``step`` takes of an item of a loader, or of an item of placeholders."""
    if isinstance(item, dict):
        named = {name: value for name, value in item.items() if name != "target"}
        return Batch((), named, item.get("target"))
    return Batch(item[:-1], {}, item[-1]) if has_target else Batch(item)


def _finite(tensor: Tensor) -> Tensor:
    """Replace inf and NaN by numbers, so that they can be compared."""
    if not tensor.is_floating_point() or tensor.isfinite().all():
        return tensor
    return tensor.nan_to_num(nan=77.0, posinf=78.0, neginf=-78.0)


def _largest(value: Any) -> float:
    """Return the largest finite number in a nested value."""
    found = [0.0]

    def look(tensor: Tensor) -> None:
        finite = tensor.detach().double()[tensor.isfinite()]
        found.append(finite.abs().max().item() if finite.numel() else 0.0)

    mapped(look, value)
    return max(found)
