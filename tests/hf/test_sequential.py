"""A model's nn.Sequential is the model: transformers' own forward and backward, in float64."""

from __future__ import annotations

import copy

import torch

from procpipe import hf
from tests.hf.cases import CASES, batch_of, loss_of, model_of, output_of


def test_logits_gradients_and_dropout_are_the_plain_models():
    for name in CASES:
        for dropout in (0.0, 0.3):
            plain = model_of(name, dropout)
            layers = hf.sequential(copy.deepcopy(plain))
            batch, labels = batch_of(name)
            torch.manual_seed(3)
            expected, _ = loss_of(name)(output_of(plain, batch), labels)
            expected.backward()
            torch.manual_seed(3)
            found, _ = loss_of(name)(layers(**batch, labels=labels), labels)
            found.backward()

            assert torch.isfinite(expected), name
            assert found == expected, name
            assert_gradients(name, layers, plain, layers.keys)


def assert_gradients(name, layers, plain, keys, tolerance=1e-14):
    """Compare the gradients of layers with the plain model's, by key."""
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for key, parameter in layers.named_parameters(remove_duplicate=False):
        gradient = expected[keys(key)].grad
        if gradient is None:
            assert parameter.grad is None, (name, key)
        else:
            scale = 1 + gradient.abs().max()
            assert (parameter.grad - gradient).abs().max() <= tolerance * scale, (name, key)
