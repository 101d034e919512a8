"""``generate`` of transformers, on a model whose forward runs the pipeline.

rank 0      transformers' generate ── forward ──> order ══> stage(…) ══> logits ── forward ──> …
others                                  follow the order: stage(…), give or pass on the logits

Only the first rank of a replica chooses tokens and calls the user's code, so criteria of time,
streamers and processors cannot make ranks differ. Caches of keys and values stay on their stages.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from procpipe.hf.layers import Block, Embed, Head, model_of
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
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise TypeError(
            f"hf.generate continues the text of a causal language model, not of a "
            f"{type(model).__name__}"
        )
    with _caching(stage) as begin:
        if stage._grid.stage != 0:
            return _follow(stage, begin)
        lead = _Lead(stage, begin)
        try:
            _check(model, input_ids, options)
            tokens = _on_stages(model, lead).generate(input_ids.to(stage.device), **options)
        except BaseException as error:
            if not lead.is_in_call:  # otherwise all ranks have failed
                stage.fetch({"fault": f"{type(error).__name__}: {error}"})
            raise
        return stage.fetch({"tokens": tokens})["tokens"]  # type: ignore[no-any-return]


def _follow(stage: Stage, begin: Callable[[bool], None]) -> Tensor:
    """Run the forward passes that the first rank orders, until it gives the tokens."""
    while True:
        order = stage.fetch(None)
        if "tokens" in order:
            tokens: Tensor = order["tokens"]
            return tokens
        if "fault" in order:
            raise ValueError(f"rank {stage._grid.rank_of(0)} could not generate: {order['fault']}")
        begin(order["use_cache"])
        stage.fetch(_last(stage()))


class _Lead:
    """What the first rank does in each forward pass: order it, run its stage, get the logits."""

    def __init__(self, stage: Stage, begin: Callable[[bool], None]) -> None:
        self._stage, self._begin = stage, begin
        (self._embed,) = (layer for layer in stage.children() if isinstance(layer, Embed))
        self.cache_name = self._embed.cache_name
        kinds = (value.dtype for value in stage.parameters() if value.is_floating_point())
        self.place = stage.device, next(kinds, torch.get_default_dtype())
        self.is_in_call = False
        self._num_tokens = 0  # of each sequence, in all passes

    def logits(self, *, use_cache: bool, **inputs: Any) -> Tensor:
        """Return the logits of the last position ``(batch, 1, words)``."""
        named = {key: inputs[key] for key in self._embed.inputs if inputs.get(key) is not None}
        size = len(named["input_ids"])
        for key, value in named.items():
            if isinstance(value, Tensor) and len(value) == 1 != size:
                named[key] = value.expand(size, *value.shape[1:])  # one row for all samples
        self.is_in_call = True
        self._stage.fetch({"use_cache": use_cache})
        self._begin(use_cache)
        logits: Tensor = self._stage.fetch(_last(self._stage(**named)))
        self.is_in_call = False
        self._num_tokens = self._num_tokens * use_cache + named["input_ids"].shape[1]
        if (is_nan := logits.isnan().flatten(1).any(1)).any():
            raise ValueError(
                f"the logits of sequence {int(is_nan.long().argmax())} are NaN after "
                f"{self._num_tokens} tokens, so there is no next one: look for NaN in the weights; "
                "some models give it for prompts that are padded on the left"
            )
        return logits


def _last(output: Any) -> Any:
    """Return the logits of an output, which may have an auxiliary loss, or the placeholder."""
    return output[0] if isinstance(output, tuple) else output


def _check(model: Any, input_ids: Any, options: dict[str, Any]) -> None:
    """Check the arguments of the first rank, of which transformers would say less."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or not input_ids.numel():
        form = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be prompts (batch, length) on rank 0, not {form}")
    mask = options.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, not {type(mask).__name__}")
    if mask is not None and (mask.shape != input_ids.shape or not mask[:, -1].all()):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} for prompts {tuple(input_ids.shape)}, "
            "or is 0 at the end of one: it must have their shape, and prompts be padded on the "
            "left (tokenizer.padding_side = 'left')"
        )
    given = options.get("generation_config") or model.generation_config
    config = copy.deepcopy(given)
    config.update(**{key: value for key, value in options.items() if hasattr(config, key)})
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in ("greedy_search", "sample"):
        raise ValueError(
            f"hf.generate cannot do {mode.value!r}, which changes caches between tokens: leave out "
            "beams and assistants; give do_sample=True, or False for the most probable tokens"
        )
    refused = [name for name in _OF_CACHES if options.get(name) is not None]
    refused += ["return_dict_in_generate"] * bool(config.return_dict_in_generate)
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: leave out, as hf.generate returns tokens only, and caches are "
            "on their stages"
        )


def _on_stages(model: Any, lead: _Lead) -> Any:
    """Return a copy of a model whose forward runs the pipeline."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def forward(self: Any, **inputs: Any) -> Any:
        use_cache = lead.cache_name is not None and inputs.get("use_cache") is not False
        logits = lead.logits(**{**inputs, "use_cache": use_cache})
        return CausalLMOutputWithPast(logits=logits)

    plain = type(model)
    forward.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]
    device, dtype = lead.place
    changes = {"forward": forward, "device": device, "dtype": dtype, "__module__": plain.__module__}
    made = copy.copy(model)
    made.__class__ = type(plain.__name__, (plain,), changes)
    return made


class _Caches:
    """The caches of the blocks of one partition, one for each micro-batch, which come in order."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._caches: list[Any] = []
        self._position = 0

    def begin(self) -> None:
        """Start with the first micro-batch again."""
        self._position = 0

    def next(self) -> Any:
        """Return the cache of the next micro-batch; a new one in the first pass."""
        if self._position == len(self._caches):
            self._caches.append(_new_cache(self._config))
        self._position += 1
        return self._caches[self._position - 1]


def _new_cache(config: Any) -> Any:
    """Return a cache of a whole model, of which only some layers will be filled."""
    from transformers import DynamicCache

    class PartOfCache(DynamicCache):
        """Is as long as those layers that are here, for masks and positions of all blocks."""

        def _filled(self, layer_idx: int) -> int:
            filled = [k for k, each in enumerate(self.layers) if _is_filled(each)]
            if not filled or layer_idx in filled:
                return layer_idx
            kind = type(self.layers[layer_idx])
            return next((k for k in filled if type(self.layers[k]) is kind), filled[0])

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return int(super().get_seq_length(self._filled(layer_idx)))

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
            return super().get_mask_sizes(query_length, self._filled(layer_idx))

    return PartOfCache(config=config)


def _is_filled(layer: Any) -> bool:
    return hasattr(layer, "get_seq_length") and layer.get_seq_length() > 0


@contextmanager
def _caching(stage: Stage) -> Iterator[Callable[[bool], None]]:
    """Let the stage's blocks use caches, and its head only the last position, for a while.

    Yields what begins a forward pass, with caches or without.
    """
    blocks = [layer for layer in stage.children() if isinstance(layer, Block)]
    heads = [layer for layer in stage.children() if isinstance(layer, Head)]
    caches = [_Caches(layer.config) for layer in blocks]  # one is used in each partition
    modes = [(module, module.training) for module in stage.modules()]

    def begin(use_cache: bool) -> None:
        for block, of_block in zip(blocks, caches, strict=True):
            of_block.begin()
            block.caches = of_block if use_cache else None

    for head in heads:
        head.num_logits = 1
    stage.eval()
    try:
        yield begin
    finally:
        for block in blocks:
            block.caches = None
        for head in heads:
            head.num_logits = 0
        for module, mode in modes:
            module.training = mode
