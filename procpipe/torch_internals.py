"""Every private name of torch that procpipe calls.

Where torch lacks one, the call that needs it ends with an error that names it. Only these have a
substitute:

    autograd.graph._engine_run_backward             torch.autograd.backward, which starts slower
    _C._are_functorch_transforms_active             weight gradients are not deferred
    Tensor._post_accumulate_grad_hooks              hooks of gradients are not found
    nn.Module._compiled_call_impl                   compiled layers look like others
    _torchdynamo_orig_callable of functions         likewise
    autograd.profiler._is_profiler_enabled          profiles do not name the tasks of a recording
    ops.aten._scaled_dot_product_flash_attention_…  its FLOPs are not counted
    ops.aten._grouped_mm                            likewise

A name may stay while its behaviour changes. Where no check could detect that (the engine), it is
used in tested releases only. ``tests/test_torch_internals.py`` looks for each in the installed
release; ruff finds private names used elsewhere.

Not here: attributes that exist since torch 1.0 and that torch's own notes name (``_version`` of
tensors; ``_modules``, ``_parameters`` and ``_buffers`` of modules).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

from procpipe.torch_versions import RELEASE, TESTED

BatchNorm = _BatchNorm
pytree = _pytree

#: Adds the gradients of all leaves that ``roots`` were computed from, given those of the roots.
#: Like ``torch.autograd.backward``, but without its check of each gradient's shape, for which
#: torch 2.13 imports sympy (``_make_grads`` in ``torch/autograd/__init__.py``): 0.6 s at first.
run_backward: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], object] = torch.autograd.backward
if RELEASE in TESTED and hasattr(torch.autograd.graph, "_engine_run_backward"):
    run_backward = partial(
        torch.autograd.graph._engine_run_backward,
        keep_graph=False,
        create_graph=False,
        inputs=(),  # all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )

#: Returns whether this is within a transformation of ``torch.func``.
#: Source: ``torch.autograd.Function.apply``,
#: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/function.py
are_functions_transformed: Any = getattr(torch._C, "_are_functorch_transforms_active", None)


def has_accumulation_hooks(parameter: nn.Parameter) -> bool:
    """Return whether hooks are called when a gradient has been added to a parameter's."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def check_gradients_by(
    scaler: torch.amp.GradScaler, checked: Callable[..., Mapping[torch.device, Tensor]]
) -> None:
    """Have a scaler's checks of gradients go through a function.

    ``unscale_``, and otherwise ``step``, checks and unscales an optimizer's gradients in one
    method, whose result ``step`` and ``update`` go by: by device, 0-dim, not 0 for an inf or NaN.
    ``checked`` is given that check, and a 0 on the scale's device, and returns what counts.
    """
    of_torch = type(scaler)._unscale_grads_

    def unscale(
        optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Mapping[torch.device, Tensor]:
        check = partial(of_torch, scaler, optimizer, inv_scale, found_inf, allow_fp16)
        return checked(check, found_inf)

    scaler._unscale_grads_ = unscale  # type: ignore[method-assign, assignment]


def finish_backward(module: nn.Module) -> None:
    """Have FSDP finish the backward passes of a module as it does in the last one.

    By an empty pass through FSDP's own hooks of the module, forward and backward: so FSDP reduces
    the gradients that earlier passes have left, with what its setters say, in any release.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    device = next(module.parameters()).device
    start = torch.zeros(1, device=device, requires_grad=True)
    with torch.enable_grad():
        inputs, _ = state._pre_forward(module, (start,), {})
        end = state._post_forward(module, inputs, inputs[0].clone())
    torch.autograd.backward(end, torch.zeros_like(end))


def reduces_in_other_dtype(module: nn.Module) -> bool:
    """Return whether FSDP adds up a module's gradients in another dtype than they are made in."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    return state._mp_policy.reduce_dtype not in (None, state._mp_policy.param_dtype)


def compile_in_place(layer: nn.Module, options: Mapping[str, Any], num_layers: int) -> None:
    """Compile what calling a layer runs, with options for ``torch.compile``.

    torch keeps at most 8 versions of one code object, here for each of ``num_layers``. Layers of
    one class share their code, and equal ones what is compiled. Where ``torch.compile`` has no
    ``recompile_limit``, each layer has a code object of its own.

    ``nn.Module.compile`` compiles the layers of users only: torch's compiler passes over torch's
    own code unless other code calls it, as ``call`` does here (seen in torch 2.13 and 2.15).
    """
    has_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    if has_limit:
        options = {"recompile_limit": 8 * num_layers, **options}
    layer.compile(**options)
    is_torchs = type(layer).__module__.startswith("torch.nn.")
    if is_torchs or (not has_limit and layer._compiled_call_impl is not None):

        def call(*args: Any, **kwargs: Any) -> Any:
            return layer._call_impl(*args, **kwargs)

        code = call.__code__.replace()
        own = FunctionType(code, call.__globals__, closure=call.__closure__)
        layer._compiled_call_impl = torch.compile(own, **options)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calling a module runs what ``torch.compile`` makes of it, or of its forward.

    What ``torch.compile`` returns for a module has a compiled forward, too.
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


@contextlib.contextmanager
def said_to_compile() -> Iterator[None]:
    """Return a context in which ``torch.compiler.is_compiling()`` is true.

    Libraries then leave out what reads values of tensors, as of masks.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module, or the backward pass of one, calls functions of users."""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a buffer is in the module's state dict."""
    return name not in module._non_persistent_buffers_set


#: By operator, functions from shapes to FLOPs that ``FlopCounterMode`` lacks.
FLOPS: dict[Any, Callable[..., int]] = {}
if _attention := getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None):
    FLOPS[_attention] = lambda query, key, *_, **__: 4 * math.prod(query) * key[-2]
if _of_experts := getattr(torch.ops.aten, "_grouped_mm", None):
    FLOPS[_of_experts] = lambda tokens, weights, *_, **__: 2 * math.prod(tokens) * weights[-1]


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Return a context in which tensors, on any device, are made without values and memory.

    Operators work out shapes, as on the meta device, but choose kernels as that device does.
    Reading a value raises an error; transformers does not read those of a mask then.
    """
    from torch._subclasses import FakeTensorMode  # takes time at first

    logger = logging.getLogger("torch._subclasses.fake_tensor")  # errors that are raised as well
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode():
            yield
    finally:
        logger.setLevel(level)


def gloo_options(gloo: Any, timeout_s: float, device: Any) -> Any:
    """Return options for a ``ProcessGroupGloo``.

    The class is an argument, here and below, as few modules may import torch.distributed.
    """
    options = gloo._Options()
    options._timeout, options._devices = timedelta(seconds=timeout_s), [device]
    return options


def nccl_options(nccl: Any, timeout_s: float, max_blocks: int) -> Any:
    """Return options for a ``ProcessGroupNCCL`` whose kernels go before others."""
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_s)
    options.config.max_ctas = max_blocks
    return options


def in_a_batch(group: Any, begin: Callable[[], None]) -> Any:
    """Begin several transfers of an NCCL group as one, and return their common ``Work``.

    A batch that fails is ended, too: otherwise NCCL begins no later transfer of this thread, of
    whatever group.
    """
    try:
        group._start_coalescing()
        begin()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it has failed already
            group._end_coalescing()
        raise
    return group._end_coalescing()


def is_profiler_on() -> bool:
    """Return whether torch's profiler records this process."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))
