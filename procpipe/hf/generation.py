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

from procpipe.hf.layers import ModelLayer, stack_of
from procpipe.hf.stack import CACHES, Stack
from procpipe.stage import Stage


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
            generator (``torch.manual_seed``) determines samples, for any number of stages. Caches
            are the stages' own, whatever ``cache_implementation`` says.

    Returns:
        Prompts and new tokens ``(batch, length + new)``, int64, on every rank, on its device.

    Raises:
        TypeError: the model was not made by ``hf.sequential``.
        ValueError: no prompts, or an option that cannot work here (beams, assistants, results
            other than tokens); or logits are NaN. On the first rank also what transformers or the
            user's code raises, on the others then a ``ValueError`` that names it. The stage can
            still be used.
        RemoteStageError: another rank failed.

    Source: ``transformers.GenerationMixin.generate``.
    """
    stack = stack_of(stage)
    with _passes(stage) as run:
        while stage._grid.stage != 0:  # follows the orders of the first rank
            order = run(None)
            if "tokens" in order:
                return order["tokens"]  # type: ignore[no-any-return]
            if "fault" in order:
                first = stage._grid.rank_of(0)
                raise ValueError(f"rank {first} could not generate: {order['fault']}")
        try:
            if input_ids is None:
                raise ValueError("rank 0 must give prompts: hf.generate(stage, input_ids, …)")
            model = _on_stages(stack, stage, run)
            generate_there = model.generate  # which only causal language models have
            model.generation_config, others = _configured(model, **options)
            tokens = generate_there(input_ids.to(stage.device), **others)
        except BaseException as error:
            with suppress(Exception):  # if a call failed, all ranks have
                run({"fault": f"{type(error).__name__}: {error}"})
            raise
        return run({"tokens": tokens})["tokens"]  # type: ignore[no-any-return]


@contextmanager
def _passes(stage: Stage) -> Iterator[Callable[..., dict[str, Any]]]:
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
        return {"logits": stage.fetch(stage(**named))}

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


def _configured(
    model: Any, generation_config: Any = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of a call as transformers merges it, and the other options."""
    from transformers import GenerationConfig

    config = copy.deepcopy(generation_config or GenerationConfig())
    defaults = model.generation_config.to_dict()
    config.update(**defaults, defaults_only=True, allow_custom_entries=True)
    others = config.update(**options)
    mode = config.get_generation_mode(others.get("assistant_model"))
    is_of_tokens = mode in ("greedy_search", "sample") and not config.return_dict_in_generate
    if not is_of_tokens or any(others.get(name) is not None for name in CACHES):
        raise ValueError(
            "hf.generate cannot do beams or assistants, continue a cache, or return other results "
            f"than tokens (this would be {mode.value}), as caches stay on their stages: leave out "
            "such options; give do_sample=True, or False for the most probable tokens"
        )
    config.cache_implementation = config.prefill_chunk_size = None
    return config, others


def _on_stages(stack: Stack, stage: Stage, run: Callable[..., dict[str, Any]]) -> Any:
    """Return a copy of a model whose forward orders a pass of all ranks, and runs it."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    @functools.wraps(stack.model.forward)  # of which transformers reads the parameters
    def forward(**inputs: Any) -> Any:
        named = {key: inputs[key] for key in stack.inputs.parameters if inputs.get(key) is not None}
        if "position_ids" in named:  # perhaps one row for all samples
            named["position_ids"] = named["position_ids"].expand(len(named["input_ids"]), -1)
        use_cache = stack.cache_name is not None and inputs.get("use_cache") is not False
        logits = run({"use_cache": use_cache}, **named)["logits"]
        if logits.isnan().any():
            raise ValueError(
                "logits are NaN, so there is no next token: look for NaN in the weights; some "
                "models give it for prompts that are padded on the left"
            )
        return CausalLMOutputWithPast(logits=logits)

    made = copy.copy(stack.model)
    made.forward = forward
    made._parameters = {"of_stage": next(stage.parameters())}  # has the device and dtype
    return made
