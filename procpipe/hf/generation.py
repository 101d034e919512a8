"""Sampling from a causal language model, with key-value caches that stay on their stages.

first rank ── prompts ──> all ranks       each token: one stage(...), whose micro-batches are
stage(...) ── logits ──> last stage       some of the sequences each; then the last stage
next tokens ── fetch ──> all ranks        chooses, and all ranks get what it chose

Each replica has sequences of its own, and their caches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from procpipe.hf.layers import Block, Head, model_of
from procpipe.stage import Stage


@torch.no_grad()
def generate(
    stage: Stage,
    input_ids: Any = None,
    *,
    max_new_tokens: int = 20,
    do_sample: bool = False,
    temperature: float = 1.0,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    attention_mask: Any = None,
) -> Tensor:
    """Continue sequences of tokens; all of them at once, as micro-batches of the stage's chunks.

    Every rank calls it; the first rank's arguments are the ones that count, so the others may pass
    nothing. Each replica continues sequences of its own. The stage is in eval mode meanwhile.

    Args:
        stage: of a causal language model by ``hf.sequential``.
        input_ids: prompts ``(batch, length)``, int64; shorter ones padded on the left.
        max_new_tokens: the most tokens to add to each sequence.
        do_sample: draw tokens by their probabilities; otherwise take the most probable one. The
            first rank's default generator (``torch.manual_seed``) determines the samples, for any
            number of stages. Penalties of repetitions, tokens that are left out, ``top_k``,
            ``top_p`` and so on are those that the model's ``generation_config`` names, and of no
            other default.
        temperature: divides the logits before tokens are drawn; above 0.
        eos_token_id: the token, or tokens, after which a sequence ends; by default that of the
            model's ``generation_config``. The rest of its row is filled with the padding token.
        attention_mask: ``(batch, length)``, 0 where a prompt is padded, 1 elsewhere; by default 0
            at tokens that are the model's padding token, unless that also ends sequences.

    Returns:
        Prompts and new tokens ``(batch, length + new)``, int64, on every rank, on its device; it
        ends where all sequences have.

    Raises:
        TypeError: the model is not a causal language model of ``hf.sequential``.
        ValueError: no prompts, or another wrong argument on rank 0.
        RemoteStageError: another rank failed.

    Source: ``transformers.GenerationMixin.generate``.
    """
    model = model_of(stage)
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise TypeError(
            f"hf.generate continues the text of a causal language model, not of a "
            f"{type(model).__name__}"
        )
    job: dict[str, Any] = {}
    if stage._grid.stage == 0:
        try:
            given = input_ids, attention_mask, max_new_tokens
            job = _job(model, *given, temperature if do_sample else None, eos_token_id)
        except (TypeError, ValueError) as error:
            job = {"fault": str(error)}
    job = stage.fetch(job)
    if "fault" in job:  # of the first rank, on every rank
        raise ValueError(job["fault"])
    return _continued(stage, **job)


def _continued(
    stage: Stage,
    tokens: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    temperature: float | None,
    seed: int,
    ends: list[int],
    padding: int,
) -> Tensor:
    """Return the sequences with what is generated; the same arguments on every rank."""
    generator = torch.Generator(stage.device).manual_seed(seed)
    is_open = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs, processors = tokens, _processors(stage, mask, ends, temperature)
    with _caching(stage) as caches:
        for _ in range(max_new_tokens):
            for cache in caches:
                cache.begin()
            output = stage(input_ids=inputs, attention_mask=mask, position_ids=positions)
            if stage._grid.stage == stage.placement[-1]:
                logits = output[0] if isinstance(output, tuple) else output
                logits = processors(tokens, logits[:, -1].float())
                output = _chosen(logits, None if temperature is None else generator)
            chosen = stage.fetch(output)
            if (is_open & (chosen < 0)).any():
                raise ValueError(
                    f"the logits of sequence {int(chosen.argmin())} are NaN after "
                    f"{tokens.shape[1]} tokens, so there is no next one: look for NaN in the "
                    "weights; some models give it for prompts that are padded on the left"
                )
            chosen = torch.where(is_open, chosen, padding)
            inputs = chosen[:, None]
            tokens = torch.cat((tokens, inputs), dim=1)
            mask = torch.cat((mask, torch.ones_like(inputs)), dim=1)
            positions = positions[:, -1:] + 1
            for end in ends:
                is_open = is_open & (chosen != end)
            if ends and not is_open.any():
                break
    return tokens


def _processors(stage: Stage, mask: Tensor, ends: list[int], temperature: float | None) -> Any:
    """Return what changes logits: the temperature, and the model's ``generation_config``."""
    model = model_of(stage)
    config = copy.deepcopy(model.generation_config)
    config.update(
        eos_token_id=ends or None, do_sample=temperature is not None, temperature=temperature
    )
    model._prepare_special_tokens(config, True, mask.device)
    given = {"attention_mask": mask}
    return model._get_logits_processor(
        config, mask.shape[1], device=mask.device, model_kwargs=given
    )


def _chosen(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the next token of each sequence, drawn by a generator if there is one.

    -1 if there is none, as logits are NaN.
    """
    has_none = logits.isnan().any(-1)
    if generator is None:
        chosen = logits.argmax(-1)
    else:
        logits = logits.masked_fill(has_none[:, None], 0.0)
        chosen = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
    return chosen.masked_fill(has_none, -1)


def _job(
    model: Any, tokens: Any, mask: Any, max_new_tokens: Any, temperature: float | None, eos: Any
) -> dict[str, Any]:
    """Return what all ranks need of rank 0's arguments, checked."""
    padding = model.generation_config.pad_token_id
    ends = _ends(model.generation_config.eos_token_id if eos is None else eos)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        form = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"input_ids must be prompts (batch, length) on rank 0, not {form}")
    if mask is None:
        is_known = padding is not None and padding not in ends
        mask = tokens != padding if is_known else torch.ones_like(tokens)
    _check_mask(mask, tokens)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, but must be an int, at least 1")
    if temperature is not None and not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}, but must be above 0: for the most probable tokens give "
            "do_sample=False"
        )
    return {
        "tokens": tokens,
        "mask": mask.to(tokens),
        "max_new_tokens": max_new_tokens,
        "temperature": None if temperature is None else float(temperature),
        "seed": 0 if temperature is None else int(torch.randint(2**62, ())),
        "ends": ends,
        "padding": padding if padding is not None else ends[0] if ends else 0,
    }


def _ends(eos: Any) -> list[int]:
    """Return the tokens after which a sequence ends."""
    eos = eos.tolist() if isinstance(eos, Tensor) else eos
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if wrong := [end for end in ends if not isinstance(end, int)]:
        raise TypeError(f"eos_token_id must be an int, or several, not {wrong[0]!r}")
    return ends


def _check_mask(mask: Any, tokens: Tensor) -> None:
    """Check that prompts are padded on the left, if at all."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, not {type(mask).__name__}")
    if mask.shape != tokens.shape or not mask[:, -1].all():
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} for prompts {tuple(tokens.shape)}, or "
            "is 0 at the end of one: it must have their shape, and prompts be padded on the left "
            "(tokenizer.padding_side = 'left')"
        )


class _Caches:
    """The key-value caches of one block, one for each micro-batch, which come in order."""

    def __init__(self) -> None:
        self._caches: list[Any] = []
        self._position = 0

    def begin(self) -> None:
        """Start with the first micro-batch again."""
        self._position = 0

    def next(self, config: Any, num_blocks: int) -> Any:
        """Return the cache of the next micro-batch; a new one in the first pass.

        Args:
            config: of the block alone, which asks for its cache by its index in the whole model.
            num_blocks: of the whole model.
        """
        if self._position == len(self._caches):
            from transformers import DynamicCache

            cache = DynamicCache(config=config)
            cache.layers *= num_blocks  # the same one at each index
            self._caches.append(cache)
        self._position += 1
        return self._caches[self._position - 1]


@contextmanager
def _caching(stage: Stage) -> Iterator[list[_Caches]]:
    """Have the stage's blocks use caches for a while, and its head only the last position."""
    blocks = [layer for layer in stage.children() if isinstance(layer, Block)]
    heads = [layer for layer in stage.children() if isinstance(layer, Head)]
    caches = [_Caches() for _ in blocks]
    modes = [(module, module.training) for module in stage.modules()]
    for block, of_block in zip(blocks, caches, strict=True):
        block.caches = of_block
    for head in heads:
        head.num_logits = 1
    stage.eval()
    try:
        yield caches
    finally:
        for block in blocks:
            block.caches = None
        for head in heads:
            head.num_logits = 0
        for module, mode in modes:
            module.training = mode
