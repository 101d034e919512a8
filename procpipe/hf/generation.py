"""``generate`` of transformers, on a model whose forward runs the pipeline.

rank 0      transformers' generate ── forward ──> order ══> stage(…) ══> logits ── forward ──> …
others                                  follow the order: stage(…), give or pass on the logits

Only the first rank of a replica chooses tokens and calls the user's code, so criteria of time,
streamers and processors cannot make ranks differ. Caches of keys and values stay on their stages.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from procpipe.data.microbatch import NoChunk
from procpipe.hf.layers import ModelLayer, model_of
from procpipe.stage import Stage

#: Options of transformers for the caches, which are here on the stages.
_OF_CACHES = ("cache_implementation", "past_key_values", "cache_params", "prefill_chunk_size")


@torch.no_grad()
def generate(stage: Stage, input_ids: Any = None, **options: Any) -> Tensor:
    """Continue sequences of tokens by transformers' own ``generate``, run on rank 0.

    Every rank calls it; the arguments of the first rank (of each replica) are the ones that count,
    so the others may pass nothing. Each forward pass runs all sequences, as micro-batches of the
    stage's chunks. Each replica continues sequences of its own. The stage is in eval mode
    meanwhile.

    Args:
        stage: of a causal language model by ``hf.sequential``.
        input_ids: prompts ``(batch, length)``, int64; shorter ones padded on the left.
        options: what ``generate`` of transformers takes: ``attention_mask``, ``max_new_tokens``,
            ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``eos_token_id``, ``max_time``,
            ``generation_config``, ``logits_processor``, ``stopping_criteria``, ``streamer`` and so
            on. By default those of the model's ``generation_config``. The first rank's default
            generator (``torch.manual_seed``) determines samples, for any number of stages.

    Returns:
        Prompts and new tokens ``(batch, length + new)``, int64, on every rank, on its device.

    Raises:
        TypeError: the model is not a causal language model of ``hf.sequential``.
        ValueError: no prompts, or an option that cannot work here (beams, assistants, results
            other than tokens); or logits are NaN. On the first rank also what transformers or the
            user's code raises, on the others then a ``ValueError`` that names it. The stage can
            still be used.
        RemoteStageError: another rank failed.

    Source: ``transformers.GenerationMixin.generate``.
    """
    model = model_of(stage)
    if not model.can_generate():
        raise TypeError(
            f"hf.generate continues the text of a causal language model, not of a "
            f"{type(model).__name__}"
        )
    with _passes(stage) as run:
        while stage._grid.stage != 0:  # follows the orders of the first rank
            order = run(None)
            if "tokens" in order:
                return order["tokens"]  # type: ignore[no-any-return]
            if "fault" in order:
                first = stage._grid.rank_of(0)
                raise ValueError(f"rank {first} could not generate: {order['fault']}")
        try:
            _check(model, input_ids, options)
            tokens = _on_stages(model, stage, run).generate(input_ids.to(stage.device), **options)
        except BaseException as error:
            with suppress(Exception):  # if a call failed, all ranks have
                run({"fault": f"{type(error).__name__}: {error}"})
            raise
        return run({"tokens": tokens})["tokens"]  # type: ignore[no-any-return]


#: Follows an order of the first rank, with the inputs that it has; returns what comes of it.
_Run = Callable[..., dict[str, Any]]


@contextmanager
def _passes(stage: Stage) -> Iterator[_Run]:
    """Let the stage's layers keep caches, and its head give the last position only, for a while.

    Yields what every rank calls: ``use_cache`` orders a forward pass, which gives the logits
    ``(batch, 1, words)``; other orders are what comes of them.
    """
    layers = [layer for layer in stage.children() if isinstance(layer, ModelLayer)]
    caches: list[list[Any]] = [[] for _ in layers]  # the first layer of a partition uses its own
    modes = [(module, module.training) for module in stage.modules()]

    def run(order: dict[str, Any] | None, **named: Any) -> dict[str, Any]:
        order = stage.fetch(order)
        if "use_cache" not in order:
            return order
        for layer, of_layer in zip(layers, caches, strict=True):
            is_kept = order["use_cache"]
            layer.caches = _in_order(of_layer, layer.stack.config) if is_kept else repeat(None)
        output = stage(**named)
        return {"logits": stage.fetch(output[0] if isinstance(output, tuple) else output)}

    stage.eval()
    try:
        yield run
    finally:
        for layer in layers:
            layer.caches = None
        for module, mode in modes:
            module.training = mode


def _in_order(caches: list[Any], config: Any) -> Iterator[Any]:
    """Yield the caches of micro-batches, which come in order; in the first pass new ones.

    Each is of a whole model, of which only some layers are filled here. For masks and positions of
    all blocks, the others are as long as those.
    """
    from transformers import DynamicCache

    for cache in caches:
        sized = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
        filled = {type(layer): layer for layer in sized if layer.get_seq_length() > 0}
        for k, layer in enumerate(cache.layers):
            if layer in sized and filled and layer.get_seq_length() == 0:
                cache.layers[k] = filled.get(type(layer), next(iter(filled.values())))
        yield cache
    while True:
        caches.append(DynamicCache(config=config))
        yield caches[-1]


def _on_stages(model: Any, stage: Stage, run: _Run) -> Any:
    """Return a copy of a model whose forward orders a pass of all ranks, and runs it."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    stack = next(layer.stack for layer in stage.children() if isinstance(layer, ModelLayer))

    @functools.wraps(model.forward)  # of which transformers reads the parameters
    def forward(**inputs: Any) -> Any:
        named = {key: inputs[key] for key in stack.inputs if inputs.get(key) is not None}
        size = len(named["input_ids"])
        for key, value in named.items():
            if isinstance(value, Tensor) and len(value) == 1 != size:
                named[key] = NoChunk(value)  # one row for all samples
        use_cache = stack.cache_name is not None and inputs.get("use_cache") is not False
        logits = run({"use_cache": use_cache}, **named)["logits"]
        if (is_nan := logits.isnan().flatten(1).any(1)).any():
            raise ValueError(
                f"the logits of sequence {int(is_nan.long().argmax())} are NaN, so there is no "
                "next token: look for NaN in the weights; some models give it for prompts that are "
                "padded on the left"
            )
        return CausalLMOutputWithPast(logits=logits)

    made = copy.copy(model)
    made.forward = forward
    made._parameters = {"of_stage": next(stage.parameters())}  # has the device and dtype
    return made


def _check(model: Any, input_ids: Any, options: dict[str, Any]) -> None:
    """Check the arguments of the first rank, of which transformers would say less."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or not input_ids.numel():
        form = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be prompts (batch, length) on rank 0, not {form}")
    mask = options.get("attention_mask")
    shape = getattr(mask, "shape", None)
    if mask is not None and (shape != input_ids.shape or not mask[:, -1].all()):
        raise ValueError(
            f"attention_mask has shape {shape and tuple(shape)} for prompts "
            f"{tuple(input_ids.shape)}, or is 0 at the end of one: it must have their shape, and "
            "prompts be padded on the left (tokenizer.padding_side = 'left')"
        )
    config = copy.deepcopy(options.get("generation_config") or model.generation_config)
    config.update(**{key: value for key, value in options.items() if hasattr(config, key)})
    mode = config.get_generation_mode(options.get("assistant_model"))
    refused = [name for name in _OF_CACHES if options.get(name) is not None]
    refused += ["return_dict_in_generate"] * bool(config.return_dict_in_generate)
    refused += [str(mode.value)] * (mode not in ("greedy_search", "sample"))
    if refused:
        raise ValueError(
            f"hf.generate cannot do {', '.join(refused)}: leave out beams, assistants and options "
            "for caches, as it returns tokens only, and caches stay on their stages; give "
            "do_sample=True, or False for the most probable tokens"
        )
