"""What the layers of a cut module compute, beside the module itself in one process."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import procpipe
from examples.train_nanogpt_plain import GPT
from procpipe import Stage
from procpipe.model.cut import layer_facts
from tests.cutting.cases import CASES, drawn, words
from tests.cutting.compare import buffers_of, gradients_of
from tests.cutting.models import Base, Classifier, Packed
from tests.dist import stages
from tests.hf.test_lora import QUERIES, adapted


def cut(between):
    torch.manual_seed(0)
    model = type("Model", (Base,), {"between": between})().double()
    return model, procpipe.sequential(model, drawn(6, 4))


def outcome(module, *args, **named):
    """Return an output, the gradients and the buffers."""
    module = copy.deepcopy(module)
    torch.manual_seed(7)
    output = module(*args, **named)
    output = getattr(output, "logits", output)
    output.square().sum().backward()
    keys = getattr(module, "keys", str)
    values = gradients_of(module, keys), buffers_of(module, keys)
    return output.detach(), *(dict(sorted(each.items())) for each in values)


def assert_same(model, layers, *args, **named):
    found, expected = (outcome(module, *args, **named) for module in (layers, model))
    stages.assert_same(found, expected, "output, gradients and buffers")


def no_grad(self, h):
    with torch.no_grad():
        mean = self.second(h).mean(0, keepdim=True) * h
    return h - mean


def in_place(self, h):
    skip = h * 1
    view = skip.view(-1)
    h = self.second(skip + 0)
    skip.add_(self.scale)  # of what was made before that module
    return h + skip + view.view_as(skip)


def reshaped(self, h):
    h = h * 1
    rows = h.shape[0]
    return h.unsqueeze_(0).expand(h.shape[0] + 1, rows, -1).sum(0) * h.shape[1]


def hooked(self, h):
    handle = self.second.register_forward_hook(lambda _, __, y: 2 * y)
    h = self.second(h)
    handle.remove()
    return h


def loop(self, h):
    mask = torch.ones(h.shape[0], 4, dtype=h.dtype, device=h.device).tril()
    mask[0, 0] = 2.0
    return h * mask + mask.sum()


def counted(self, h):
    self.count.add_(1)
    return h * self.count


BETWEEN = {
    "a region without gradients": no_grad,
    "changes in place": in_place,
    "a shape that is changed": reshaped,
    "hooks": hooked,
    "numbers of NumPy": lambda self, h: h * np.sqrt(2.0) + np.float32(0.5),
    "a mask that is changed": loop,
    "a buffer that is changed": counted,
    "dropout": lambda self, h: F.dropout(h, 0.5, self.training),
    "a mode": lambda self, h: h * (2.0 if self.training else 3.0),
    "a parameter": lambda self, h: F.linear(h, self.first.weight) * self.scale,
    "views": lambda self, h: h.view(h.size(0) // 1, 2, -1).transpose(1, 2).flatten(1),
    "chunks": lambda self, h: torch.cat([part * k for k, part in enumerate(h.chunk(2, dim=-1))], 1),
    "a size as a number": lambda self, h: h * (7 - h.shape[0] / 2) + h.sum() / h.numel(),
    "torch's random numbers": lambda self, h: h + torch.rand_like(h) * torch.rand(4),
    "checkpointing": lambda self, h: checkpoint(self.second, h, use_reentrant=False),
    "a dtype": lambda self, h: h.to(torch.float32).to(h.dtype),
    "max": lambda self, h: h.max(dim=1, keepdim=True).values * h,
    "a message": lambda self, h: torch._assert(h.dim() == 2, f"got {h.shape} {h.size(0)}") or h,
    "a module of its own": lambda self, h: nn.Softmax(dim=1)(h),
    "a mask of a size": lambda self, h: h.masked_fill(self.bias[0, : h.size(0), :4] == 0, 0.5),
    "a module of a dict": lambda self, h: self.inner.act(h),
    "a mask of values": lambda self, h: h + h[h.sum(-1) > 0].sum(0),
    "a device": lambda self, h: h * (2 if h.device.type == "cpu" else 3) + torch.ones(4).to("cpu"),
    "parameters in place of a module's": lambda self, h: torch.func.functional_call(
        self.second, {"weight": self.scale.diag()}, h
    ),
    "another module's parameters": lambda self, h: torch.func.functional_call(
        self.second, dict(self.first.named_parameters()), h
    ),
    "a kind of device": lambda self, h: h * (2 if h.is_meta else 3 if h.is_cpu else 4),
    "a rounded size": lambda self, h: (
        h[: math.ceil(h.shape[0] / 3)].sum(0) * round(h.shape[0] * 0.7) + h
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_layers_compute_what_the_module_does(name):
    model, layers = cut(BETWEEN[name])

    assert len(layers) >= 2
    for is_training in (True, False):
        for rows in (6, 6, 3):
            model.train(is_training)
            layers.train(is_training)
            assert_same(model, layers, drawn(rows, 4))


class Tied(nn.Module):
    """Uses a parameter of another module, which it does not register."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, h, given=None):
        return h @ (self.other[0].weight if given is None else given).T


def test_a_module_that_uses_what_another_has_is_opened_but_not_one_that_is_given_it():
    class Model(Base):
        def between(self, h):
            return self.inner["tied"](h, self.first.weight)

    model: Any = Model().double()
    model.third, model.inner["tied"] = Tied(model.first), Tied(model.first)
    layers = procpipe.sequential(model, drawn(6, 4))
    assert "third" not in layers.describe(), "else another process had a copy of first.weight"
    assert "self.inner.tied(" in layers.describe()
    assert_same(model, layers, drawn(5, 4))


def test_ranks_compare_what_layers_compute_and_no_error():
    def facts_of(dtype):
        def between(self, h):
            with torch.autocast("cpu", dtype):
                assert self.training, object()
                return self.second(h)

        return layer_facts(cut(between)[1])

    assert facts_of(torch.bfloat16) == facts_of(torch.bfloat16) != facts_of(torch.float16)


class Chosen(nn.Module):
    """Reads values, draws random numbers, and changes what it is given in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, h):
        assert random.random() + np.random.rand() < 2
        chosen = (x.sum(-1) > 0).nonzero()[:, 0]
        h[chosen] = 0
        return self.inner(x) * float(x.sum() > 0), len(chosen)


class Named(nn.Module):
    """Names what it returns by the number of rows, and changes one if this is odd."""

    def forward(self, h):
        names = "ab" if len(h) > 4 else "ba"
        return dict(zip(names, (h + 1 if len(h) % 2 else h, 2 * h), strict=True))


def test_what_a_whole_module_returns_must_be_nested_as_in_the_sample():
    class Model(Base):
        def __init__(self):
            super().__init__()
            self.named = Named()

        def forward(self, x):
            found = self.named(self.first(x))
            return self.third(found["a"] - self.second(found["b"]))

    torch.manual_seed(0)
    model = Model().double()
    layers = procpipe.sequential(model, drawn(6, 4))
    assert_same(model, layers, drawn(5, 4))
    with pytest.raises(ValueError, match=r"(?s)recorded for a sample with .*'a', 'b'.*'b', 'a'"):
        layers(drawn(3, 4))


def test_a_module_that_does_not_run_on_the_meta_device_has_the_samples_values():
    model = Classifier().double()
    layers = procpipe.sequential(model, words(3, 7), whole=(Packed,))
    assert_same(model, layers, words(4, 9))
    with pytest.raises(ValueError, match=r"(?s)Length of all .*packed = .*those of the sample"):
        procpipe.sequential(model, words(3, 7).to("meta"), whole=(Packed,))


def test_an_error_of_a_layer_names_the_models_line():
    layers: Any = cut(lambda self, h: self.second(h) + torch.ones(6, 4))[1]
    with pytest.raises(RuntimeError, match="size of tensor a") as caught:
        layers(drawn(3, 4))
    (note,) = caught.value.__notes__
    assert "test_sequential.py" in note
    assert note.endswith("self.second(h) + torch.ones(6, 4))[1]")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whole_modules_may_read_values_and_change_what_they_are_given(device):
    class Model(Base):
        def __init__(self):
            super().__init__()
            self.chosen = Chosen()

        def forward(self, x):
            h = self.first(x)
            changed = h * 1
            y, number = self.chosen(h, changed)
            return self.third(self.second(y)) + changed * number

    with torch.device(device):
        model = Model().double()
    layers = procpipe.sequential(model, drawn(6, 4), whole=(Chosen,))
    if device == "cpu":
        assert_same(model, layers, drawn(6, 4))
        assert_same(model, layers, drawn(3, 4))


def test_no_cut_is_between_memory_and_its_change():
    layers: Any = cut(in_place)[1]

    (changing,) = [text for text in layers.describe().split("\n\n") if ".add_(" in text]
    assert ".mul(" in changing
    assert len(layers) > 1


def test_autocast_and_a_region_without_it():
    def between(self, h):
        with torch.autocast(h.device.type, enabled=False):
            ones = torch.ones(4, device=h.device)
            return torch.stack([self.second(input=h.float()), ones.expand_as(h)]).sum(0)

    torch.manual_seed(0)
    model = type("Model", (Base,), {"between": between})()
    layers = procpipe.sequential(model, drawn(6, 4).float())
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            expected = model(drawn(3, 4).float())
            found = layers(drawn(3, 4).float())
        assert found.dtype == expected.dtype == (torch.bfloat16 if enabled else torch.float32)
        assert torch.equal(found, expected)


DECISIONS = {
    "a dtype": (
        BETWEEN["a dtype"],
        drawn(6, 4).float(),
        "with torch.float64 here, and has torch.f",
    ),
    "a branch": (
        lambda self, h: h * 2 if h.shape[0] > 4 else h,
        drawn(4, 4),
        r"(?s)sample with True.*if h.shape\[0\] > 4",
    ),
    "a loop": (
        lambda self, h: torch.stack([row * k for k, row in enumerate(h)]),
        drawn(5, 4),
        "sample with 6 here",
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_was_decided_for_the_sample_is_checked_in_each_call(name):
    between, other, text = DECISIONS[name]
    model, layers = cut(between)

    assert_same(model, layers, drawn(6, 4))
    with pytest.raises(ValueError, match=text):
        layers.to(other.dtype)(other)
    assert layer_facts(procpipe.sequential(model, other)) != layer_facts(layers)


def another_autocast(self, h):
    with torch.autocast(h.device.type, torch.bfloat16, enabled=self.training):
        return self.second(h)


OTHERS = [
    another_autocast,
    lambda self, h: (h, h) if self.training else {"a": h, "b": h},
    lambda self, h: self.second(h) if self.training else h,
]


@pytest.mark.parametrize("differs", OTHERS)
def test_an_eval_mode_of_another_structure_is_an_error_there(differs):
    def forward(self, x):
        return differs(self, self.third(self.second(self.first(x))))

    layers = procpipe.sequential(type("Model", (Base,), {"forward": forward})(), torch.ones(6, 4))

    layers(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"(?s)another one in eval mode: .*(self\.|its end)"):
        layers.eval()(torch.ones(3, 4))


def test_an_opened_modules_own_train_is_called():
    class Frozen(Base):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def between(self, h):
            return self.norm(h)

    model = Frozen().double().train()
    layers = procpipe.sequential(model, drawn(6, 4)).train()
    assert_same(model, layers, drawn(6, 4))
    assert not model.norm.training


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", ["in place", "wrapped", "its forward"])
def test_compiled_blocks_stay_compiled(way):
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    model: Any = nn.Sequential(nn.Linear(4, 4), Base(), nn.Linear(4, 4)).double()
    expected = model(drawn(6, 4))
    if way == "in place":
        model[1].compile(backend=backend)
    elif way == "its forward":
        model[1].forward = torch.compile(model[1].forward, backend=backend)
    else:
        model[1] = torch.compile(model[1], backend=backend)
    layers = procpipe.sequential(model, drawn(6, 4))
    assert not made, "the forward was recorded as it was written"

    assert torch.equal(layers(drawn(6, 4)), expected)
    assert len(made) == 1
    layers(drawn(6, 4)).sum().backward()
    assert model[1].first.weight.grad is not None
    assert {layers.keys(key) for key in layers.state_dict()} == model.state_dict().keys()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_can_be_compiled():
    model = Base().double()
    stage = Stage(procpipe.sequential(model, drawn(6, 4)))
    stage.compile(backend="eager")

    for rows in (6, 3):
        torch.testing.assert_close(stage(drawn(rows, 4)), model(drawn(rows, 4)))


@dataclass
class Result:
    logits: torch.Tensor
    count: int


torch.utils._pytree.register_dataclass(Result, serialized_type_name="tests.cutting.Result")


def test_a_dataclass_is_returned():
    whole = type("Whole", (Base,), {"forward": lambda self, x: Result(Base.forward(self, x), 3)})()
    layers = procpipe.sequential(whole.double(), drawn(6, 4))

    found = layers(drawn(3, 4))
    assert torch.equal(found.logits, whole(drawn(3, 4)).logits)
    assert found.count == 3


def test_arguments_by_name_that_are_no_tensors_may_be_left_out():
    class Model(Base):
        def forward(self, x, *, bias=None, twice=False):
            h = super().forward(x)
            h = h if bias is None else h + bias
            return 2 * h if twice else h

    model, x = Model().double(), drawn(6, 4)
    layers = procpipe.sequential(model, x, bias=x, twice=True)

    expected = model(drawn(3, 4), bias=2 * drawn(3, 4), twice=True)
    assert torch.equal(layers(drawn(3, 4), bias=2 * drawn(3, 4)), expected)
    with pytest.raises(TypeError, match=r"recorded.*'twice'.*\[True\]\).*given.*\[False\]\)"):
        layers(drawn(3, 4), bias=drawn(3, 4), twice=False)
    with pytest.raises(TypeError, match=r"'bias': .*\(2, 'dim.*'bias': .*\(3, 'dimensions'\)"):
        layers(x, bias=x[None])
    with pytest.raises(TypeError, match="recorded for arguments of the form"):
        layers(drawn(3, 4))


def test_all_keys_are_the_models_and_the_layers_describe_themselves():
    model = GPT()
    layers: Any = procpipe.sequential(model, words(2, 9))

    assert {layers.keys(key) for key in layers.state_dict()} == model.state_dict().keys()
    assert layers.sample[0].is_meta
    text = layers.describe()
    assert "takes idx: torch.int64 (2, 9), 144 bytes from the model's inputs" in text
    assert "= self.lm_head(" in text


def test_what_depends_on_sizes_alone_is_made_by_one_layer():
    def forward(self, x):
        positions = torch.arange(x.shape[0], device=x.device)[:, None]
        return self.third(self.second(self.first(x) + positions) + positions) + positions

    model = type("Model", (Base,), {"forward": forward})().double()
    layers = procpipe.sequential(model, drawn(6, 4))
    with patch.object(torch, "arange", wraps=torch.arange) as positions:
        layers(drawn(6, 4))
    assert positions.call_count == 1
    assert_same(model, layers, drawn(3, 4))


class Positions(Base):
    """Initialises what it holds itself."""

    def reset_parameters(self: Any):
        nn.init.normal_(self.scale, std=0.5)
        self.count.zero_()
        self.bias.fill_(2)

    def forward(self, x):
        return super().forward(x + self.scale) * self.scale


def test_a_model_on_the_meta_device_is_initialised_by_its_own_method():
    with torch.device("meta"):
        model: Any = Positions()
    layers = procpipe.sequential(model, torch.ones(2, 4))
    torch.manual_seed(3)
    stage = Stage(layers)

    values = {layers.keys(key): value for key, value in stage.state_dict().items()}
    assert values.keys() == model.state_dict().keys()
    plain: Any = Positions()
    plain.load_state_dict(values)
    assert 0.01 < plain.scale.std() < 2
    assert torch.equal(stage(drawn(2, 4).float()), plain(drawn(2, 4).float()))


def assert_alike(values, model):
    """Compare initial values with those of a model that was built with memory."""
    for key, expected in model.state_dict().items():
        if expected.numel() > 100 and (spread := expected.std()) > 0:
            assert 0.5 < values[key].std() / spread < 2, key
        else:
            assert values[key].isfinite().all(), key


@pytest.mark.parametrize("name", ["ViT", "T5", "Mixtral"])
def test_a_model_of_transformers_on_the_meta_device_is_initialised_as_there(name):
    case = CASES[name]
    with torch.device("meta"):
        model = case.make().double()
    args, named = case.inputs(4)
    layers = procpipe.sequential(model, *args, **named)
    stage = Stage(layers)

    plain = case.make().double()
    values = {layers.keys(key): value for key, value in stage.state_dict().items()}
    assert_alike(values, plain)
    plain.load_state_dict(values)
    expected = case.output(plain.train()(*args, **named))
    assert torch.equal(case.output(layers(*args, **named)), expected)


@pytest.mark.parametrize("width", [20, 2000])
def test_a_model_within_another_is_initialised_by_its_own_rule(width):
    """Where the outer one is opened and the inner one is, too, or stays whole."""
    import transformers

    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = transformers.SiglipVisionConfig(
        image_size=16, patch_size=4, intermediate_size=20, vision_use_head=False, **small
    )
    decoder = transformers.BertConfig(
        vocab_size=31, is_decoder=True, add_cross_attention=True, intermediate_size=width, **small
    )
    join = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs
    config = join(encoder, decoder)
    with torch.device("meta"):
        model = transformers.VisionEncoderDecoderModel(config)
    sample: dict[str, Any] = {
        "pixel_values": drawn(2, 3, 16, 16).float(),
        "decoder_input_ids": words(2, 6),
    }
    layers = procpipe.sequential(model, **sample, use_cache=False)
    values = {layers.keys(key): value for key, value in Stage(layers).state_dict().items()}

    assert_alike(values, transformers.VisionEncoderDecoderModel(config))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_low_rank_adapters_are_trained():
    model: Any = adapted("Llama", **QUERIES).get_base_model()
    args, named = CASES["Llama"].inputs(4)
    assert_same(model, procpipe.sequential(model, *args, **named), **named)


def test_a_stage_of_an_ordinary_module_names_sequential():
    with pytest.raises(TypeError, match=r"(?s)procpipe\.sequential\(model, sample\).*any_module"):
        Stage(nn.Linear(2, 2))  # type: ignore[arg-type]
