"""Which classes of models were compared with transformers; others are, when the model is divided.

A small float64 copy of such a model, as a pipeline's layers, must have the logits and the gradients
of every parameter of transformers, with padding on both sides. It takes seconds, on the CPU, before
the stage is built.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: The classes that docs/language_models.md lists, which ``python -m tests.hf`` compares.
COMPARED = frozenset(
    (
        *("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
        *("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"),
        *("Olmo2ForCausalLM", "GPTNeoXForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"),
        *("FalconForCausalLM", "MptForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM"),
        *("GraniteForCausalLM", "Starcoder2ForCausalLM", "SmolLM3ForCausalLM"),
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"),
        *("GemmaForCausalLM", "PhiForCausalLM", "Mamba2ForCausalLM", "Olmo3ForCausalLM"),
        *("BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"),
    )
)

_NUM_WORDS, _NUM_SAMPLES, _LENGTH = 64, 3, 7

#: The copy is not larger, in parameters, and has no more blocks.
_MOST_PARAMETERS, _MOST_BLOCKS = 200_000_000, 12

#: How names of widths in a configuration end; all are divided by one factor, the first that works.
_WIDTHS = (
    *("hidden_size", "intermediate_size", "_dim", "_rank", "n_embd", "n_inner"),
    *("d_model", "d_ff", "expand_dim"),
)
_FACTORS = (16, 8, 4, 2, 1)

#: The least width of an attention head of the copy.
_LEAST_HEAD = 8


def is_compared(model: nn.Module) -> bool:
    """Return whether the class of a model was compared with transformers as a whole."""
    is_theirs = type(model).__module__.startswith("transformers.models.")
    return is_theirs and type(model).__name__ in COMPARED


def unsupported(model: Any, reason: str) -> TypeError:
    """Return the error for a model that cannot be made a pipeline."""
    return TypeError(
        f"hf.sequential cannot divide a {type(model).__qualname__}: {reason}; models that work are "
        "listed in docs/language_models.md, with or without LoRA of peft"
    )


def check_equal(
    model: Any, blocks: Sequence[nn.Module], divide: Callable[[Any], nn.Sequential]
) -> None:
    """Compare a small copy of a model with what ``divide`` makes of it.

    Does not communicate, and does not change the state of the random generators.

    Args:
        model: of transformers, of any size, perhaps on the meta device.
        blocks: the model's.
        divide: makes the layers of a pipeline of a model.

    Raises:
        TypeError: logits or gradients differ, or no small copy runs.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(0)
        plain, batch = _small(model, _num_blocks(model.config, blocks))
        expected = _step(plain, batch, plain)
        try:
            found = _step(divide(plain), batch, plain)  # has the same parameters
        except Exception as error:
            raise unsupported(model, f"a small copy of it fails: {error}") from error
        for name, ours in found.items():
            if not torch.allclose(ours, expected[name], rtol=1e-10, atol=1e-10):  # or is NaN
                raise unsupported(model, f"a small copy of it has {name} unlike transformers'")


def _small(model: Any, num_blocks: int) -> tuple[Any, dict[str, Tensor]]:
    """Return a small copy that runs, with random parameters in float64, and a mini-batch for it.

    Some models cannot have padding on the left, for which they compute NaN.
    """
    fault = "it would have too many parameters"
    for factor in _FACTORS:
        config = _shrunk(model.config, num_blocks, factor)
        try:
            with torch.device("meta"):
                num = sum(p.numel() for p in type(model)(copy.deepcopy(config)).parameters())
            if num > _MOST_PARAMETERS:
                break
            made = type(model)._from_config(config, dtype=torch.float64).double().train()
            _randomise(made)
            for left in (True, False):
                batch = _batch(config.vocab_size, left=left)
                with torch.no_grad():
                    logits, _ = _outputs(made, batch)
                if logits.isfinite().all():
                    return made, batch
            fault = "its logits are not finite"
        except Exception as error:
            fault = str(error).partition("\n")[0]
    raise unsupported(model, f"no small copy of it could be compared with transformers: {fault}")


def _shrunk(config: Any, num_blocks: int, factor: int) -> Any:
    """Return a configuration of so many of the blocks, with widths divided by a factor."""
    made = copy.deepcopy(config)
    heads = max(getattr(config, "num_attention_heads", 1) or 1, 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    factor = math.gcd(factor, max(width // _LEAST_HEAD, 1))
    for name, value in list(vars(made).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(made, name, value[:num_blocks])
        elif isinstance(value, float) and "drop" in name and "layer" not in name:
            setattr(made, name, 0.0)
        elif type(value) is int and name.endswith(_WIDTHS) and value % factor == 0:
            setattr(made, name, value // factor)
        elif type(value) is int and name.endswith("_token_id"):
            setattr(made, name, value % 3)
    made.num_hidden_layers = num_blocks
    made.vocab_size = min(made.vocab_size, _NUM_WORDS)
    made._experts_implementation = "eager"
    if "fl" in (made._attn_implementation or ""):  # flash and flex attention are for GPUs
        made._attn_implementation = "eager"
    return made


def _num_blocks(config: Any, blocks: Sequence[nn.Module]) -> int:
    """Return how many of the first blocks have all kinds of them, at least two where there are.

    Of one kind are those with equal modules, shapes of parameters, and values in lists of the
    configuration that have one for each block (its type of attention).
    """
    lists = [each for each in vars(config).values() if isinstance(each, list)]
    of_blocks = [each for each in lists if len(each) == len(blocks)]
    kinds = [
        repr((block, [p.shape for p in block.parameters()], [each[k] for each in of_blocks]))
        for k, block in enumerate(blocks)
    ]
    last = max(kinds.index(kind) for kind in kinds)
    return min(max(last + 1, 2), len(blocks), _MOST_BLOCKS)


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Change all parameters, some of which would be 0 or 1, and leave out no dropout."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _batch(num_words: int, *, left: bool) -> dict[str, Tensor]:
    tokens = torch.randint(3, num_words, (_NUM_SAMPLES, _LENGTH))
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    if left:
        mask[2, :2] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _outputs(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits that count, and the auxiliary loss, or 0 if there is none."""
    torch.manual_seed(1)
    if isinstance(model, nn.Sequential):
        result = model(**batch)
        logits, auxiliary = result if isinstance(result, tuple) else (result, None)
    else:
        result = model(**batch, use_cache=False)
        logits, auxiliary = result.logits, result.get("aux_loss")
        if auxiliary is not None:
            auxiliary = model.router_aux_loss_coef * auxiliary
    mask = batch["attention_mask"]
    logits = logits[mask.bool()] if logits.shape[:2] == mask.shape else logits
    return logits, torch.zeros(()) if auxiliary is None else auxiliary


def _step(model: nn.Module, batch: dict[str, Tensor], plain: nn.Module) -> dict[str, Tensor]:
    """Return the results of a model, and the gradients of the plain one's parameters, by name.

    They are of a sum over the results, in which every element has its own weight.
    """
    logits, auxiliary = _outputs(model, batch)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
    keys, parameters = zip(*plain.named_parameters(), strict=True)
    total = auxiliary + (logits * weights).sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    named = {f"a gradient of {key}": value for key, value in zip(keys, gradients, strict=True)}
    return {"logits": logits, "an auxiliary loss": auxiliary, **named}
