"""The models that are compared, small and random, and mini-batches for them; all in float64."""

from __future__ import annotations

import importlib
import importlib.util
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from examples.train_nanogpt_plain import GPT
from tests.cutting import models


@dataclass(frozen=True)
class Case:
    """A model, and what it is called with.

    Attributes:
        make: builds the model.
        inputs: makes the positional and named arguments of a mini-batch of so many samples.
        output: from what the model returns to what the loss is of.
        modes: the modes that it is compared in.
        options: for ``procpipe.sequential``.
        package: what the environment needs.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    output: Callable[[Any], Tensor] = lambda result: result
    modes: tuple[bool, ...] = (True, False)
    options: dict[str, Any] = field(default_factory=dict)
    package: str = "torch"

    @property
    def is_here(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def words(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(3, 31, shape, generator=generator)


def images(size=16, channels=3):
    return lambda b: ((drawn(b, channels, size, size),), {})


def _vision(name, of="models", **options):
    def make():
        import torchvision

        where = operator.attrgetter(of)(torchvision)
        model = getattr(where, name)(num_classes=5, **options)
        for module in model.modules():  # dropout draws other numbers on each stage
            if hasattr(module, "p"):
                module.p = 0.0
        return model

    return make


def _hf(family, suffix, **values):
    def make():
        import transformers

        config = getattr(transformers, f"{family}Config")(**values)
        return getattr(transformers, family + suffix)(config)

    return make


def _of_hf(name, **others):
    """Return what builds a model of tests/hf/cases.py."""

    def make():
        from tests.hf.cases import class_of, config_of

        return class_of(name)(config_of(name, **others))

    return make


def _logits(result):
    return result.logits


def _tokens(**more):
    return lambda b: ((), {"input_ids": words(b, 9), "use_cache": False, **more})


def _masked(b):
    mask = (torch.arange(9) < 6 + torch.arange(b)[:, None]).long()  # rows of other lengths
    return (), {"input_ids": words(b, 9), "attention_mask": mask, "use_cache": False}


_VIT: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 20}
_VIT |= {"num_hidden_layers": 3, "image_size": 16, "patch_size": 4}
_VIT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VIT_B: dict[str, Any] = {"image_size": 32, "patch_size": 16, "hidden_dim": 16, "mlp_dim": 32}
_VIT_B |= {"num_layers": 12, "num_heads": 2}
_T5: dict[str, Any] = {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 20}
_T5 |= {"num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}

CASES: dict[str, Case] = {
    "U-Net": Case(models.UNet, images(18)),
    "U-Net of a time": Case(models.TimeUNet, lambda b: ((drawn(b, 3, 8, 8), words(b)), {})),
    "nanoGPT": Case(GPT, lambda b: ((words(b, 9),), {})),
    "two towers": Case(
        models.TwoTower,
        lambda b: ((drawn(b, 6),), {"item": drawn(b, 5)}),
        lambda result: result["scores"][:, None] * result["query"],
    ),
    "shared block": Case(models.shared, lambda b: ((drawn(b, 6),), {})),
    "GRU": Case(models.Classifier, lambda b: ((words(b, 7),), {})),
    "nn.Transformer": Case(
        lambda: nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True),
        lambda b: ((drawn(b, 5, 8), drawn(b, 4, 8)), {}),
    ),
    "GPT-2": Case(_of_hf("GPT-2"), _tokens(), _logits, package="transformers"),
    "Llama": Case(_of_hf("Llama"), _masked, _logits, package="transformers"),
    "Llama without mask": Case(_of_hf("Llama"), _tokens(), _logits, package="transformers"),
    "BERT": Case(
        _of_hf("BERT"),
        lambda b: ((), {"input_ids": words(b, 9), "attention_mask": torch.ones(b, 9).long()}),
        _logits,
        package="transformers",
    ),
    "ViT": Case(
        _hf("ViT", "ForImageClassification", **_VIT), images(), _logits, package="transformers"
    ),
    "Mixtral": Case(
        _of_hf("Mixtral", output_router_logits=False), _tokens(), _logits, package="transformers"
    ),
    "T5": Case(
        _hf("T5", "ForConditionalGeneration", **_T5),
        lambda b: ((), _masked(b)[1] | {"decoder_input_ids": words(b, 6)}),
        _logits,
        package="transformers",
    ),
    **{
        f"torchvision {name}": Case(_vision(name), images(32), package="torchvision")
        for name in ("resnet50", "densenet121", "swin_t", "efficientnet_b0")
    },
    "torchvision vit_b_16": Case(  # the class of vit_b_16, which has 86 M parameters
        _vision("VisionTransformer", **_VIT_B), images(32), package="torchvision"
    ),
    "torchvision fcn_resnet50": Case(
        _vision("fcn_resnet50", of="models.segmentation", weights_backbone=None),
        images(32),
        lambda result: result["out"],
        package="torchvision",
    ),
    "torchvision googlenet": Case(
        _vision("googlenet", aux_logits=True, init_weights=False),
        images(64),
        lambda result: result.logits + result.aux_logits1 + result.aux_logits2,
        modes=(True,),
        package="torchvision",
    ),
    "timm convnext_tiny": Case(
        lambda: importlib.import_module("timm").create_model(
            "convnext_tiny", num_classes=5, depths=(1, 1, 2, 1), dims=(8, 16, 32, 64)
        ),
        images(32),
        package="timm",
    ),
}
