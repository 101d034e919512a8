"""Which classes of models were compared with transformers; others are, when the model is divided.

A small float64 copy of such a model, as a pipeline's layers, must have the logits and the gradients
of every parameter of transformers, with padding on both sides. It takes seconds, on the CPU, before
the stage is built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_DECODERS = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi", "Phi3", "Olmo2"),
    *("Olmo3", "GPTNeoX", "Mixtral", "Qwen3Moe", "Falcon", "Mpt", "Cohere", "Cohere2", "Granite"),
    *("Starcoder2", "SmolLM3", "DeepseekV2", "DeepseekV3", "GptOss", "Mamba2"),
)
_BERTS = ("BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM")

#: The classes that docs/language_models.md lists, which ``tests/hf/test_pipelines.py`` compares.
COMPARED = {"GPT2LMHeadModel", *_BERTS, *(f"{name}ForCausalLM" for name in _DECODERS)}

_NUM_WORDS, _NUM_SAMPLES, _LENGTH = 64, 3, 7

#: The copy has at most so many parameters, of the first blocks, and of experts in a block.
_MOST_PARAMETERS, _MOST_BLOCKS, _MOST_EXPERTS = 200_000_000, 8, 16

#: How names of widths in a configuration end; all are divided by one factor, the first that works.
_WIDTHS = (
    *("hidden_size", "intermediate_size", "_dim", "_rank", "n_embd", "n_inner"),
    *("d_model", "d_ff", "expand_dim"),
)
_FACTORS = (16, 8, 4, 2, 1)


def unsupported(model: Any, reason: str) -> TypeError:
    """Return the error for a model that cannot be made a pipeline."""
    return TypeError(
        f"hf.sequential cannot divide a {type(model).__qualname__}: {reason}; models that work are "
        "listed in docs/language_models.md, with or without LoRA of peft"
    )


def check_equal(model: Any, divide: Callable[[Any], nn.Sequential]) -> None:
    """Compare a small copy of a model with the layers that ``divide`` makes of it.

    Does not communicate, and does not change the state of the random generators.

    Raises:
        TypeError: logits or gradients differ, or no small copy runs.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(0)
        plain, batch = _small(model)
        expected = _step(plain, batch, plain)
        try:
            found = _step(divide(plain), batch, plain)  # has the same parameters
        except Exception as error:
            raise unsupported(model, f"a small copy of it fails: {error}") from error
        for name, ours in found.items():
            if not torch.allclose(ours, expected[name], rtol=1e-10, atol=1e-10):  # or is NaN
                raise unsupported(model, f"a small copy of it has {name} unlike transformers'")


def _small(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a small copy that runs, with random parameters in float64, and a mini-batch for it.

    Some models cannot have padding on the left, for which they compute NaN.
    """
    fault = "it would have too many parameters"
    for factor in _FACTORS:
        config = _shrunk(model.config, factor)
        try:
            with torch.device("meta"):
                num = sum(p.numel() for p in type(model)(copy.deepcopy(config)).parameters())
            if num > _MOST_PARAMETERS:
                break
            made = type(model)._from_config(config, dtype=torch.float64).double().train()
            for parameter in made.parameters():  # some of which are 0 or 1
                parameter.data += 0.1 * torch.randn_like(parameter)
            for num_left in (2, 0):
                tokens = torch.randint(3, config.vocab_size, (_NUM_SAMPLES, _LENGTH))
                mask = torch.ones_like(tokens)
                mask[1, -2:] = mask[2, :num_left] = 0
                batch = {"input_ids": tokens * mask, "attention_mask": mask}
                with torch.no_grad():
                    logits = _results(made, batch)["logits"]
                if logits.isfinite().all():
                    return made, batch
            fault = "its logits are not finite"
        except Exception as error:
            fault = str(error).partition("\n")[0]
    raise unsupported(model, f"no small copy of it could be compared with transformers: {fault}")


def _shrunk(config: Any, factor: int) -> Any:
    """Return a configuration of the first blocks, with fewer experts and narrower by a factor."""
    made = copy.deepcopy(config)
    num_blocks = min(config.num_hidden_layers, _MOST_BLOCKS)
    for name, value in list(vars(made).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(made, name, value[:num_blocks])
        elif type(value) is int and name.endswith(_WIDTHS) and value % factor == 0:
            setattr(made, name, value // factor)
        elif type(value) is int and name.endswith("_experts"):
            setattr(made, name, min(value, _MOST_EXPERTS))
        elif type(value) is int and name.endswith("_token_id"):
            setattr(made, name, value % 3)
    made.num_hidden_layers = num_blocks
    made.vocab_size = min(made.vocab_size, _NUM_WORDS)
    made._experts_implementation = "eager"
    if "fl" in (made._attn_implementation or ""):  # flash and flex attention are for GPUs
        made._attn_implementation = "eager"
    return made


def _results(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits that count, and the auxiliary loss if there is one, by what they are."""
    torch.manual_seed(1)
    if isinstance(model, nn.Sequential):
        result = model(**batch)
        logits, *losses = result if isinstance(result, tuple) else (result,)
    else:
        result = model(**batch, use_cache=False)
        logits, losses = result.logits, []
        if result.get("aux_loss") is not None:
            losses = [model.router_aux_loss_coef * result.aux_loss]
    mask = batch["attention_mask"]
    logits = logits[mask.bool()] if logits.shape[:2] == mask.shape else logits
    return dict(zip(("logits", "an auxiliary loss"), (logits, *losses), strict=False))


def _step(model: nn.Module, batch: dict[str, Tensor], plain: nn.Module) -> dict[str, Tensor]:
    """Return the results of a model, and the gradients of the plain one's parameters, by name.

    They are of a sum over the results, in which every element has its own weight.
    """
    results = _results(model, batch)
    flat = torch.cat([result.flatten() for result in results.values()])
    total = flat @ torch.linspace(-1, 1, len(flat), dtype=flat.dtype)
    keys, parameters = zip(*plain.named_parameters(), strict=True)
    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    named = {f"a gradient of {key}": value for key, value in zip(keys, gradients, strict=True)}
    return results | named
