"""What cannot be cut is refused, with the line and what to do."""

from __future__ import annotations

import functools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import procpipe
from tests.cutting.cases import CASES, words
from tests.cutting.models import Base


class Reverse(torch.autograd.Function):  # whose result is a view, as of a function of torch
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def if_positive(self, h):
    if h.sum() > 0:
        h = h + 1
    return h


def sets_attribute(self, h):
    self.last = h
    return h


def changes_parameter(self, h):
    with torch.no_grad():
        self.second.bias.add_(1)
    return h


GENERATOR = np.random.default_rng(0)
DRAWS = "changes the random numbers of Python or NumPy"

REFUSED = {
    "a branch on values": (if_positive, "cannot be recorded: .*if h.sum\\(\\) > 0:.*no values"),
    "item": (lambda self, h: h * h.sum().item(), "item\\(\\) cannot be called on meta"),
    "tolist": (lambda self, h: h * h.tolist()[0][0], "cannot be recorded.*meta"),
    "numpy": (lambda self, h: h * float(h.detach().numpy()[0, 0]), "numpy.*meta|meta.*numpy"),
    "an autograd.Function": (lambda self, h: Reverse.apply(h) + 1, "Reverse is a .*: .an autog"),
    "one without gradients": (lambda self, h: Reverse.apply(h.detach()), "Reverse is a .*: .one w"),
    "an attribute": (
        sets_attribute,
        r"changes Model\.last, which [^\n]*, in [^\n]*test_refusals\.py:\d+: self\.last = h\n",
    ),
    "a list that grows": (lambda self, h: self.calls.append(1) or h, "changes Model.calls.*: .a l"),
    "Python's random": (lambda self, h: h * random.random(), f"{DRAWS}.*: .Python's random"),
    "NumPy's random": (lambda self, h: h * np.random.rand(), f"{DRAWS}.*: .NumPy's random"),
    "a generator": (lambda self, h: h * self.rng.random(), "changes Model.rng.*: lambda self, h"),
    "a global generator": (
        lambda self, h: h * GENERATOR.random(),
        "another one each time.*: lambda self, h: h . GENERATOR",
    ),
    "another mode of a module": (
        lambda self, h: self.second.eval() and h,
        "sets training of a Linear.*: lambda self, h: self.second.eval",
    ),
    "a word of Python": (lambda self, h: self.inner["in"](h), "inner.in has a name that"),
    "data": (lambda self, h: h.data + 1, "data of a tensor is used"),
    "a hook": (lambda self, h: h.register_hook(print) and h, "register_hook of a tensor is used"),
    "a changed parameter": (changes_parameter, "changes second.bias in place"),
    "an object": (
        lambda self, h: self.second(random.Random(h.dim())),
        "Random is passed on.*whole=",
    ),
    "a packed sequence": (
        lambda self, h: self.second(pack_padded_sequence(h[None], torch.tensor([len(h)]), True)),
        "pack_padded_sequence.*module of its own",
    ),
    "reentrant checkpointing": (
        lambda self, h: checkpoint(self.second, h, use_reentrant=True),
        "use_reentrant=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_layers_would_not_repeat_is_refused_with_its_line(name):
    between, text = REFUSED[name]
    model = type("Model", (Base,), {"between": between})()
    with pytest.raises(ValueError, match=f"(?s){text}") as caught:
        procpipe.sequential(model, torch.ones(6, 4))
    message = str(caught.value)
    assert f"{Path(__file__).parent}/" in message
    assert "whole=" in message or "\n" in message, "it says what to do"


def test_a_cached_property_is_refused_if_its_value_is_a_tensor_or_may_change():
    class Cached(Base):
        factor = functools.cached_property(lambda self: 2.0 + len(self.calls))
        offset = functools.cached_property(lambda self: 2 * self.scale)

        def between(self, h):
            return h * self.factor + (self.offset if self.calls else 0)

    model, x = Cached(), torch.ones(6, 4)
    assert torch.equal(procpipe.sequential(model, x)(x), model(x))
    model = Cached()
    model.calls.append(1)
    with pytest.raises(ValueError, match=r"changes .*Cached\.offset, which"):
        procpipe.sequential(model, x)

    class Listed(Base):
        seen = functools.cached_property(lambda self: [1])

        def between(self, h):
            return h * len(self.seen)

    with pytest.raises(ValueError, match=r"changes .*Listed\.seen"):
        procpipe.sequential(Listed(), x)


def test_an_attribute_is_compared_for_each_module_of_a_class():
    class Counts(Base):
        def between(self, h):
            if self.calls:
                self.calls.append(1)
            return h

    model: Any = nn.Sequential(Counts(), Counts())
    model[0].calls.append(1)
    with pytest.raises(ValueError, match=r"changes .*Counts\.calls"):
        procpipe.sequential(model, torch.ones(6, 4))


def compiled(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def sharded(model):
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    try:
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()


COMPILED = r"(?s)Base is compiled as a whole.*stage\.compile\(\)"
X = torch.ones(6, 4)
NO_MODELS = {
    "compiled in place": (lambda m: m.compile(backend="eager") or m, (X,), COMPILED),
    "a compiled forward": (compiled, (X,), COMPILED),
    "a script": (lambda m: torch.jit.ScriptModule(), (X,), "by torch.jit.*that it was made of"),
    "sharded": (sharded, (X,), "FSDPBase is sharded.*cut the model first.*replicas.md"),
    "data parallel": (nn.DataParallel, (X,), "DataParallel.*remove the wrapper"),
    "no sample": (lambda m: m, (), r"Base has no tensor, in .*procpipe.sequential\(model, x\)"),
    "two inputs": (lambda m: m, (X, X), r"3 were given, in .*procpipe.sequential\(model, x\)"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_no_model_with_its_sample_is_refused(name):
    make, sample, text = NO_MODELS[name]
    with pytest.raises((TypeError, ValueError), match=f"(?s){text}"):
        procpipe.sequential(make(Base()), *sample)


@pytest.mark.parametrize("whole", [Base, ("Base",), None])
def test_classes_that_stay_whole_are_classes(whole):
    with pytest.raises(TypeError, match=r"whole is .*as in whole=\(Block,\)"):
        procpipe.sequential(Base(), X, whole=whole)


def test_a_function_that_calls_the_model_itself_is_refused():
    model: Any = nn.Sequential(Base(), nn.Linear(4, 4))
    model[0].norm = nn.BatchNorm1d(4)
    model[0].between = lambda h: model[0].norm(h)
    with pytest.raises(ValueError, match=r"(?s)own BatchNorm1d is used.*norm\(h\)\nmake it a"):
        procpipe.sequential(model, X, whole=(Base,))
    assert model[0].norm.num_batches_tracked == 0


def test_a_model_with_hooks_is_refused_and_one_with_hooks_inside_is_not():
    model, calls = Base(), []
    model.second.register_forward_hook(lambda *_: calls.append(1))
    layers = procpipe.sequential(model, torch.ones(6, 4))
    calls.clear()
    layers(torch.ones(6, 4))
    assert calls == [1]
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"the Base cannot be copied: .*lock"):
        procpipe.sequential(model, torch.ones(6, 4))
    model.register_forward_hook(print)
    with pytest.raises(ValueError, match="the Base is compiled as a whole or has hooks"):
        procpipe.sequential(model, torch.ones(6, 4))


def test_a_cache_is_refused_by_the_option_that_leaves_it_out():
    model = CASES["Llama"].make()
    with pytest.raises(ValueError, match=r"(?s)Cache is passed on.*llama\.py.*use_cache=False"):
        procpipe.sequential(model, words(2, 5))


@torch.inference_mode()
def test_modules_in_another_mode_stay_whole():
    model = nn.Sequential(Base(), nn.Linear(4, 4)).train()
    assert len(procpipe.sequential(model, torch.ones(6, 4))) == 4
    model[0].eval()
    assert len(procpipe.sequential(model, torch.ones(6, 4))) == 2
