"""The emulated GPU's operators: equal to the CPU's results in every bit, in stream order.

python -m tests.emulated_gpu --delay-us 300 --starve-ms 20 -- python -m pytest --gpus=all FILE
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

emulated = hasattr(ctypes.CDLL(None), "emulated_gpu_synchronizations")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not emulated, reason="tests the emulated GPU itself"),
]


def on_gpu(value: Any, device: str = "cuda") -> Any:
    """Copy tensors, in any structure, to a GPU with their strides."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        y = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
        return y.copy_(x.detach()).requires_grad_(x.requires_grad)

    return tree_map(move, value)


def assert_same(cpu: Any, gpu: Any) -> None:
    """Assert that two structures hold the same bits; the second one's tensors are on a GPU."""
    on_cpu, on_gpus = tree_flatten(cpu)[0], tree_flatten(gpu)[0]
    assert len(on_cpu) == len(on_gpus)
    for a, b in zip(on_cpu, on_gpus, strict=True):
        if isinstance(a, Tensor):
            assert b.is_cuda
            torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


torch.manual_seed(0)
x, y = torch.randn(5, 6), torch.randn(5, 6)
square, batch = torch.randn(6, 6), torch.randn(3, 5, 6)
image = torch.randn(2, 4, 9, 9)
ints, mask = torch.tensor([[2, 0, 1], [1, 1, 4]]), x > 0
z = torch.randn(4, 4, dtype=torch.complex64)

OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lambda a, b: a + b * 2 - 1, (x, y)),
    "scalar on the CPU": (lambda a: a * torch.tensor(3.0) + torch.tensor(2), (x,)),
    "promotion": (
        lambda a, b: (a + b, a / b, b // 2, b**2.0),
        (torch.arange(1, 6), torch.ones(5, dtype=torch.int32)),
    ),
    "transposed": (lambda a, b: a.t() @ b, (x, y)),
    "channels_last": (
        lambda a: (a * 2).relu(),
        (image.contiguous(memory_format=torch.channels_last),),
    ),
    "expanded": (lambda a: a[:1].expand(5, 6).sum(0), (x,)),
    "empty": (lambda a: (a[:0] + 1, a[:0].sum(), torch.cat([a[:0], a])), (x,)),
    "strided": (lambda a: a[::2, 1::3].mul_(2), (x.clone(),)),
    "sort": (
        lambda a: (a.sort(1), a.topk(3), a.argmax(1), a.max(0), a.median(1), a.kthvalue(2)),
        (x,),
    ),
    "where": (
        lambda a, b, m: (torch.where(m, a, b), torch.where(m, a, 0.0), a.masked_fill(m, 1)),
        (x, y, mask),
    ),
    "index by ints": (lambda a, i: (a[i], a[:, i[0]], a[1], a[i[0], i[1]]), (x, ints)),
    "index by mask": (lambda a, m: (a[m], a[m.any(1)], a.masked_select(m)), (x, mask)),
    "index_put": (
        lambda a, i: a.index_put_((i[0], i[1]), torch.ones((), device=a.device), accumulate=True),
        (x.clone(), ints),
    ),
    "mask_put": (
        lambda a, m: (a.masked_fill_(m, 0), a.__setitem__(~m, 2.0), a)[2],
        (x.clone(), mask),
    ),
    "scatter": (
        lambda a, i: (a.gather(1, i), a.scatter_add(1, i, a), a.index_select(0, i[0])),
        (x, ints),
    ),
    "nonzero": (
        lambda a, m: (
            m.nonzero(),
            m.nonzero(as_tuple=True),
            torch.unique(a.round()),
            torch.bincount(a.abs().long().flatten()),
        ),
        (x, mask),
    ),
    "values": (
        lambda a, m: (
            a.sum().item(),
            m.tolist(),
            bool(m.any()),
            torch.equal(a, a),
            a.isfinite().all().item(),
        ),
        (x, mask),
    ),
    "cat and split": (
        lambda a, b: (torch.cat([a, b], 1).chunk(3), torch.stack([a, b]).unbind(), a.split([2, 3])),
        (x, y),
    ),
    "linalg": (
        lambda a: (
            torch.linalg.inv(a),
            torch.linalg.qr(a),
            torch.linalg.svdvals(a),
            torch.linalg.solve(a, a),
        ),
        (square,),
    ),
    "complex": (
        lambda a: (
            a.conj() @ a,
            a.mH + a,
            a.conj().imag,
            a.abs(),
            torch.view_as_real(a) * 2,
            a.conj().resolve_conj(),
        ),
        (z,),
    ),
    "bfloat16": (
        lambda a: (a.bfloat16() + 1, F.layer_norm(a.bfloat16(), (6,)), a.bfloat16().float()),
        (x,),
    ),
    "foreach": (
        lambda a, b: (
            torch._foreach_add([a, b], 1.0),
            torch._foreach_mul([a, b], [b, a]),
            torch._foreach_norm([a, b]),
        ),
        (x, y),
    ),
    "foreach in place": (
        lambda a, b: (
            torch._foreach_mul_([a, b], 2.0),
            torch._foreach_addcdiv_([a], [b], [b], -0.1),
            a,
            b,
        )[2:],
        (x.clone(), y.clone()),
    ),
    "repeat": (
        lambda a, i: (a.repeat(2, 1), a.repeat_interleave(2, 0), a.repeat_interleave(i, 0)),
        (x, torch.tensor([1, 2, 0, 1, 3])),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name):
    function, arguments = OPERATORS[name]
    expected = function(*copy.deepcopy(arguments))
    assert_same(expected, function(*on_gpu(arguments)))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.arange(0, 10, 3, device=d),
        lambda d: torch.arange(0, 1, 0.1, device=d),
        lambda d: torch.linspace(0, 1, 7, device=d),
        lambda d: torch.full((2, 3), 7, device=d),
        lambda d: torch.tril_indices(3, 4, device=d),
        lambda d: torch.tensor([[1.0, 2], [3, 4]], device=d),
        lambda d: torch.zeros(0, 3, device=d),
        lambda d: torch.meshgrid(
            torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij"
        ),
    ],
)
def test_factory(make):
    with torch.device("cuda"):  # a torch function mode, which must not affect meta kernels
        assert_same(make("cpu"), make("cuda"))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
        (x,),
    ),
    "activations": (lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.PReLU(), nn.GLU()), (x,)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (image,)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (image,)),
    "pools": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2, padding=1), nn.AdaptiveAvgPool2d(2)),
        (image,),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
        (image,),
    ),
    "layer norm": (lambda: nn.LayerNorm(6), (x,)),
    "rms norm": (lambda: nn.RMSNorm(6), (x,)),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=1), (ints,)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
        (batch,),
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_module(name, training):
    make, inputs = MODULES[name]
    torch.manual_seed(1)
    cpu = make().train(training)
    gpu = copy.deepcopy(cpu).cuda()
    results = []
    for module, given in ((cpu, copy.deepcopy(inputs)), (gpu, on_gpu(inputs))):
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            leaves = [t.requires_grad_(t.is_floating_point()) for t in given]
            output = module(*leaves)
            output.square().sum().backward()
        grads = [t.grad for t in (*leaves, *module.parameters())]
        results.append((output.detach(), grads, list(module.buffers())))
    assert_same(*results)


def test_attention_chooses_a_kernel_that_the_cpu_has():
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(batch, batch, batch, is_causal=True)
    gpu = batch.cuda()
    assert_same(expected, F.scaled_dot_product_attention(gpu, gpu, gpu, is_causal=True))


def test_operators_import_no_compiler():
    """Python's meta kernels import torch._dynamo, which takes a second of each process."""
    code = "import sys, torch; torch.ones(512, 512, device='cuda') + 1; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch._dynamo" not in done.stdout.split()


def test_out_is_resized():
    out = torch.empty(0, device="cuda")
    assert torch.add(x.cuda(), 1, out=out) is out
    assert_same(x + 1, out)


@pytest.mark.gpu(2)
def test_copies():
    pinned = x.pin_memory()
    a = pinned.to("cuda:0", non_blocking=True)
    b = a.to("cuda:1")
    c = torch.empty(6, 5, dtype=torch.float64, device="cuda:0").copy_(
        b.t()
    )  # across, cast, strided
    assert_same((x, x, x.t().double()), (a, b, c))
    assert_same(x.t().bfloat16(), x.t().to("cuda", torch.bfloat16))
    back = torch.empty_like(x, pin_memory=True).copy_(a, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, x)
    assert "cuda:1" in repr(b)
    saved = io.BytesIO()
    torch.save(b, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    assert loaded.device == b.device
    assert_same((x, x), (loaded, copy.deepcopy(b)))


RANDOM: list[Callable[[], Tensor]] = [
    lambda: torch.rand(50, device="cuda"),
    lambda: torch.randn(50, device="cuda"),
    lambda: torch.randperm(50, device="cuda"),
    lambda: torch.empty(50, device="cuda").bernoulli_(0.5),
    lambda: F.dropout(torch.ones(50, device="cuda"), 0.5),
    lambda: torch.multinomial(torch.ones(50, device="cuda"), 20),
]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("draw", RANDOM)
def test_random(draw):
    torch.cuda.manual_seed(3)
    cpu_state = torch.get_rng_state()
    first = draw()
    state = torch.cuda.get_rng_state()
    second = draw()
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), second)
    torch.cuda.manual_seed(3)
    torch.rand(3)
    assert torch.equal(draw(), first)
    torch.set_rng_state(cpu_state)
    draw()
    assert torch.equal(torch.get_rng_state(), cpu_state)
    state = torch.cuda.get_rng_state()
    with torch.cuda.device(1):
        torch.cuda.manual_seed(3)
        other = torch.cuda.get_rng_state()
        assert torch.equal(draw().cpu(), first.cpu())
        assert not torch.equal(torch.cuda.get_rng_state(), other)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    generator = torch.Generator("cuda").manual_seed(3)
    assert torch.equal(
        torch.rand(9, device="cuda", generator=generator),
        torch.rand(9, device="cuda", generator=generator.manual_seed(3)),
    )


def test_dropout_scales_the_kept_elements():
    kept = F.dropout(torch.ones(1000, device="cuda"), 0.25)
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 650 < int((kept > 0).sum()) < 850


@pytest.mark.gpu(2)
def test_errors():
    with pytest.raises(RuntimeError, match="same device"):
        x.cuda() + y
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"must match|broadcast"):
        x.cuda() + torch.ones(4, device="cuda")
    with pytest.raises(NotImplementedError, match="_conv_depthwise2d"):
        torch.ops.aten._conv_depthwise2d(
            image.cuda(), torch.ones(4, 1, 3, 3).cuda(), (3, 3), None, (1, 1), (0, 0), (1, 1)
        )
    with pytest.raises(RuntimeError):
        torch.mm(x.cuda().to_sparse(), square.cuda())


def hold(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for a while, so that later work on it runs late."""
    with torch.cuda.stream(stream):
        a = torch.ones(600, 600, device="cuda")
        for _ in range(20):
            a @ a


@pytest.mark.parametrize("waits", [True, False])
def test_wait_for_a_producer(waits):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    result = torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    hold(main)
    result += 1
    if waits:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        seen = result * 1
    side.synchronize()
    with torch.cuda.stream(side):
        assert bool((seen == 1).all()) is waits


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("records", [True, False])
def test_record_stream(records, writes):
    side = torch.cuda.Stream()
    given, result = torch.ones(100, device="cuda"), torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    hold(side)
    with torch.cuda.stream(side):
        if writes:
            given += 1  # without record_stream the memory belongs to another tensor by then
        else:
            result += given
    if records:
        given.record_stream(side)
    address = given.data_ptr()
    del given
    # Nothing else overwrites the memory: only the poison of freed memory changes the result.
    other = (torch.zeros if writes else torch.empty)(100, device="cuda")
    assert (other.data_ptr() == address) is not records
    torch.cuda.synchronize()
    good = bool((other == 0).all()) if writes else bool((result == 1).all())
    assert good is records


LAZY = """
import torch
from tests.held import happens, hold_for

x = torch.ones(3, device="cuda")
waited = []
for _ in range(2):
    may_go_on = hold_for(torch.cuda.Stream(), 0.3)
    y = x.neg()
    waited.append(may_go_on.is_set())
    assert happens(may_go_on.is_set, 10.0)
print(waited)
"""


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, [True, False]),
        ({"CUDA_MODULE_LOADING": "EAGER"}, [False, False]),
    ],
    ids=["lazy", "eager"],
)
def test_the_first_launch_of_an_operator_waits_for_the_device(settings, found):
    done = subprocess.run(
        [sys.executable, "-c", LAZY], env=os.environ | settings, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.decode().strip() == str(found)
