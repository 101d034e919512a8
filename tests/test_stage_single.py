"""A Stage without a launcher: the whole model in one stage; every mistake raises at once."""

from __future__ import annotations

import copy
import gc
import io
import signal
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from procpipe import BalanceError, BoundaryError, NoChunk, Stage, StageClosedError
from tests.dist.stages import make_batch
from tests.dist.test_replicas import Scaled
from tests.skip.layers import stasher


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stage_of():
    """Return ``stage_of(model, balance, **options)``; the stages are closed at the end."""
    stages = []

    def make(*args, **options):
        stages.append(Stage(*args, **options))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


# -- mistakes of the constructor -----------------------------------------------------------------


def four():
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


def stashing():
    return nn.Sequential(stasher("skip"))


def named_step():
    return nn.Sequential(OrderedDict(step=nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("model", "balance", "options", "error", "message"),
    [
        (four, [2, 1], {}, BalanceError, r"\[2, 1\] places 3 layers but the model has 4"),
        (four, [4], {"chunks": 0}, ValueError, "chunks is 0, but a mini-batch has at least 1"),
        (four, [4], {"chunks": 2.0}, TypeError, "chunks must be an int, not 2.0"),
        (four, [4], {"checkpoint": "sometimes"}, ValueError, "'sometimes'; it must be one of"),
        (four, [4], {"devices": []}, IndexError, "1 process but 0 devices"),
        (four, [4], {"devices": ["meta"]}, ValueError, r"devices=\['meta'\]: list one device"),
        (stashing, [1], {}, TypeError, "for 1 pop that no layer does"),
        (named_step, [1], {}, KeyError, "attribute 'step' already exists"),
    ],
)
def test_each_mistake_in_the_constructor_is_an_error(model, balance, options, error, message):
    with pytest.raises(error, match=message):
        Stage(model(), balance, **options)


# -- mistakes of a call --------------------------------------------------------------------------


def call_without_chunks(stage):
    stage.chunks = 0
    stage(make_batch()[0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s(), TypeError, "holds no tensor to scatter"),
        (lambda s: s({1, 2}), BoundaryError, "builtins.set at input"),
        (
            lambda s: s.step(torch.ones(4, 4).double(), torch.ones(3)),
            ValueError,
            "the input has 4 samples but target has 3",
        ),
        (lambda s: next(iter(s.batches(1))), TypeError, "'int' object is not iterable"),
        (lambda s: s.step(*make_batch(), 1, 2), TypeError, r"step\(a, b, c, target=y\)"),
        (lambda s: s((1, object())), BoundaryError, r"builtins\.object at input\[0\]\[1\]"),
        (lambda s: s.step(make_batch()[0], [{1}]), BoundaryError, r"builtins\.set at target\[0\]"),
        (call_without_chunks, ValueError, "chunks is 0"),
    ],
)
def test_each_mistake_in_a_call_is_an_error(stage_of, call, error, message):
    stage = stage_of(make_model(), [4], loss_fn=F.cross_entropy)
    with pytest.raises(error, match=message):
        call(stage)
    with pytest.raises(StageClosedError, match=r"step\(\) cannot run: .* failed on this rank with"):
        stage.step(*make_batch())


@pytest.mark.parametrize("value", [True, torch.tensor(True), "1", None, [1], 1j])
def test_a_sum_over_replicas_is_one_of_numbers(stage_of, value):
    with pytest.raises(TypeError, match=r"sum_over_replicas\(\) takes a number"):
        stage_of(make_model(), [4]).sum_over_replicas(value)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda o, t: o, ValueError, r"loss_fn returned shape \(5, 3\), but must return"),
        (lambda o, t: 1.0, ValueError, "loss_fn returned <class 'float'>"),
        (lambda o, t: None, ValueError, "loss_fn returned <class 'NoneType'>"),
        (
            lambda o, t: (o.argmax(1) == t).double().mean(),
            RuntimeError,
            "so nothing would be trained",
        ),
    ],
)
def test_a_loss_must_be_a_number_of_the_graph(stage_of, loss_fn, error, message):
    stage = stage_of(make_model(), [4], chunks=2, loss_fn=loss_fn)
    with pytest.raises(error, match=message) as caught:
        stage.step(*make_batch())
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert error is RuntimeError or "task F0@0 (micro-batch 0), loss_fn" in notes


def test_a_target_gets_the_gradient_of_the_plain_model(stage_of):
    plain = make_model()
    inputs, target = make_batch()[0], torch.randn(10, 3).double().requires_grad_()
    stage = stage_of(copy.deepcopy(plain), [4], loss_fn=F.mse_loss)
    (expected,) = torch.autograd.grad(F.mse_loss(plain(inputs), target), [target])
    stage.step(inputs, target)
    assert target.grad is not None
    assert torch.equal(target.grad, expected)


def test_a_step_needs_a_loss_and_loss_weights_a_target(stage_of):
    with pytest.raises(ValueError, match=r"step\(\) needs a loss: give Stage"):
        stage_of(make_model(), [4]).step(*make_batch())
    stage = stage_of(make_model(), [4], loss_fn=torch.mean, loss_weight=len)
    with pytest.raises(ValueError, match="loss_weight needs a target"):
        stage.step(make_batch()[0])


def test_the_exception_of_a_layer_is_kept_with_a_note_of_its_place(stage_of):
    stage = stage_of(make_model(), [4], chunks=4, loss_fn=F.cross_entropy)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        stage.step(torch.ones(8, 5).double(), torch.ones(8).long())
    assert caught.value.__notes__ == [
        "procpipe: layer '0' (Linear) was given (float64 (2, 5),)",
        "procpipe: in stage 0 (rank 0), task F0@0 (micro-batch 0), layer '0' (Linear)",
    ]


def test_an_output_goes_backward_once_and_before_the_next(stage_of):
    stage = stage_of(make_model(), [4], chunks=2)
    first = stage(make_batch()[0])
    stage(make_batch()[0])
    with pytest.raises(RuntimeError, match="a later call of the stage has dropped"):
        first.sum().backward()
    stage = stage_of(make_model(), [4], chunks=2)
    output = stage(make_batch()[0])
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward pass was run already"):
        output.sum().backward()


# -- the whole model in one stage ----------------------------------------------------------------


def test_a_balance_of_several_parts_makes_one_stage(stage_of):
    stage = stage_of(make_model(), (1, 2, 1), chunks=2, loss_fn=F.cross_entropy)
    assert stage.balance == [4]
    assert (stage.rank, len(stage), stage.devices) == (0, 4, [stage.device])
    assert list(stage.state_dict()) == list(make_model().state_dict())
    # A parameter that two of the parts share is in one stage now.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    shared = stage_of(model, [1, 1], loss_fn=torch.mean)
    shared.step(torch.ones(4, 2))
    assert shared[0].weight is shared[1].weight


def test_the_mode_of_the_model_is_kept(stage_of):
    model = make_model()
    model[1].eval()
    stage = stage_of(model, [4])
    assert stage.training
    assert [layer.training for layer in stage] == [True, False, True, True]
    assert not stage_of(make_model().eval(), [4]).training


def test_a_stage_is_an_nn_sequential(stage_of):
    model = make_model()
    layers = list(model)
    stage = stage_of(model, [4])
    assert isinstance(stage, nn.Sequential)
    assert list(stage) == layers
    assert stage[1] is layers[1]
    assert list(stage[1:3].children()) == layers[1:3]
    assert type(stage[1:3]) is nn.Sequential
    assert [name for name, _ in stage.named_children()] == ["0", "1", "2", "3"]
    assert stage.get_submodule("3") is layers[3]
    assert list(stage.parameters()) == list(model.parameters())
    assert stage.training
    assert not stage.eval().training
    assert not layers[1].training
    assert stage.double() is stage
    assert str(stage).startswith("Stage(\n  (0): Linear(")


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for its device on a GPU: values read one by one."""

    num_waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_clipping_reads_no_value_of_each_parameter():
    counts = []
    for num_layers in (1, 5):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
        stage = Stage(model, loss_fn=F.mse_loss)
        stage.step(torch.ones(2, 2), torch.zeros(2, 2))
        with Waits() as waits:
            stage.clip_grad_norm_(1.0)
        counts.append(waits.num_waits)
        stage.close()

    assert counts[0] == counts[1]


def test_clipping_of_several_dtypes_is_torchs_to_the_last_bit(stage_of):
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float16]
    stage = stage_of(nn.Sequential(*(nn.Linear(2, 2).to(dtype) for dtype in dtypes)), [4])
    plain = copy.deepcopy(list(stage.parameters()))
    assert torch.equal(stage.clip_grad_norm_(1.0), torch.tensor(0.0)), "no gradient yet"
    for seed in range(20):
        torch.manual_seed(seed)
        for ours, theirs in zip(stage.parameters(), plain, strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        assert torch.equal(stage.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain, 0.5))


def test_a_model_without_layers(stage_of):
    stage = stage_of(nn.Sequential(), [], chunks=2)
    inputs = make_batch()[0]
    assert torch.equal(stage(inputs), inputs)
    a, b = stage(inputs, {"x": inputs})
    assert torch.equal(a, b["x"])
    torch.optim.AdamW(stage.parameters())
    stage.requires_grad_(False)
    torch.optim.AdamW(p for p in stage.parameters() if p.requires_grad)


def test_statistics_and_report(stage_of):
    stage = stage_of(make_model(), [4], chunks=5, loss_fn=F.cross_entropy)
    with pytest.raises(StageClosedError, match="no statistics before the first call"):
        stage.statistics()
    for _ in range(2):
        stage.step(*make_batch())
    statistics = stage.statistics()
    assert (statistics.stage, statistics.num_steps) == (0, 2)
    assert statistics.num_tasks == {"F": 10, "B": 10, "R": 8}
    assert (statistics.sent_bytes, statistics.num_messages) == ({}, {})
    assert 0 < statistics.busy_s <= statistics.step_s
    assert 0 <= statistics.bubble < 1
    assert statistics.waiting_s == 0
    assert statistics.split is None
    header, line, _, *table = stage.report().splitlines()
    assert header.split()[:5] == ["stage", "steps", "F", "R", "B"]
    assert line.split()[:5] == ["0", "2", "10", "8", "10"]
    split = stage.statistics().split
    assert split is not None
    assert f"{split.busy_s * 1e3:.2f}" in table[-1]


def test_a_trace_needs_a_file_in_an_existing_folder(stage_of, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "run.json"):
        with pytest.raises(ValueError, match="must be a file in a folder that is there"):
            stage_of(make_model(), [4], trace=path)


def test_calls_of_a_closed_stage_are_errors(stage_of):
    stage = stage_of(make_model(), [4], loss_fn=F.cross_entropy)
    stage.step(*make_batch())
    stage.close()
    stage.close()
    for call in (
        lambda: stage.step(*make_batch()),
        lambda: stage(make_batch()[0]),
        lambda: stage.fetch(1),
        lambda: stage.clip_grad_norm_(1.0),
        lambda: stage.report(),
        lambda: next(iter(stage.batches([1]))),
    ):
        with pytest.raises(StageClosedError, match="the stage was closed"):
            call()
    assert stage.state_dict().keys() == make_model().state_dict().keys()


def test_a_loop_stops_on_signals_in_the_main_thread_only():
    errors = []

    def loop():
        stage = Stage(make_model(), [4])
        with pytest.raises(RuntimeError, match="in the main thread only") as caught:
            list(stage.batches([1], stop_on=(signal.SIGTERM,)))
        errors.append(caught.value)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert errors


def test_a_state_dict_of_the_whole_model_is_pickled(stage_of):
    file = io.BytesIO()
    torch.save(stage_of(make_model(), [4]).state_dict(), file)
    file.seek(0)
    assert list(torch.load(file)) == list(make_model().state_dict())


@pytest.mark.parametrize("fails", [False, True])
def test_a_stage_that_was_closed_or_failed_can_be_deleted(fails):
    stage = Stage(make_model(), [4], chunks=2, loss_fn=F.cross_entropy)
    stage.step(*make_batch())
    stage(make_batch()[0]).sum().backward()
    reference = weakref.ref(stage)
    if fails:
        with pytest.raises(TypeError, match="no tensor"):
            stage()
    else:
        stage.close()
    del stage
    gc.collect()
    assert reference() is None


def test_a_stage_cannot_be_changed_or_copied():
    stage = Stage(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [2])
    for change in (
        lambda: stage.append(nn.ReLU()),
        lambda: stage.insert(0, nn.ReLU()),
        lambda: stage.__setitem__(0, nn.ReLU()),
        lambda: stage.__delitem__(0),
        lambda: stage.pop(0),
    ):
        with pytest.raises(TypeError, match="change the model before Stage"):
            change()
    with pytest.raises(TypeError, match=r"copy its state_dict\(\)"):
        copy.deepcopy(stage)


def test_without_a_launcher_no_balance_is_needed(stage_of, capsys):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert stage_of(model, None, chunks=8).balance == [2]
    assert stage_of(model, "size", sample=torch.ones(8, 2), chunks=8).balance == [2]
    assert stage_of(nn.Sequential(), None).balance == [0]
    assert capsys.readouterr() == ("", "")


def test_an_input_may_be_sparse():
    class Mixed(nn.Module):
        def forward(self, x, adjacency):
            return torch.sparse.mm(adjacency, x)

    model = nn.Sequential(Mixed(), nn.Linear(2, 1))
    adjacency, x = torch.eye(3).to_sparse(), torch.ones(3, 2)
    expected = F.mse_loss(model[1](x), torch.zeros(3, 1))
    stage = Stage(model, [2], chunks=1, checkpoint="never", loss_fn=F.mse_loss)

    loss = stage.step(x, NoChunk(adjacency), target=torch.zeros(3, 1))

    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("left_out", [0, 3])
def test_a_loss_is_trained_after_a_frozen_model_and_a_micro_batch_that_is_left_out(
    stage_of, mode, left_out
):
    """Only the micro-batches that count require a gradient, which recomputation must predict."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().requires_grad_(False)
    loss_fn, expected = Scaled(), Scaled()
    expected.load_state_dict(loss_fn.state_dict())
    inputs, target = torch.randn(2, 8, 4).double()
    rows = slice(2 * left_out, 2 * left_out + 2)
    counted = [k for k in range(8) if k not in range(8)[rows]]
    weight = torch.ones(8)
    weight[rows] = 0
    stage = stage_of(
        model,
        [2],
        chunks=4,
        checkpoint=mode,
        loss_fn=lambda output, both: loss_fn(output, both[0]),
        loss_weight=lambda both: both[1].sum(),
    )

    for _ in range(2):
        loss = stage.step(inputs, (target, weight))
        truth = expected(model(inputs[counted]), target[counted])
        truth.backward()

        torch.testing.assert_close(loss, truth.detach())
        torch.testing.assert_close(loss_fn.scale.grad, expected.scale.grad)
    one = nn.Parameter(torch.ones(()))
    assert not stage_of(model.eval(), [2], loss_fn=lambda *_: one).step(inputs).requires_grad
