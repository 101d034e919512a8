"""Compares models as pipelines of one, two and three processes with transformers, in float64.

For each case, tied and untied: loss and gradients of a mini-batch of each form, the logits of what
``hf.save_pretrained`` writes, and greedy tokens.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from procpipe import hf
from tests.dist.stages import stage_of
from tests.hf.cases import (
    CASES,
    MORE,
    batch_of,
    batches_of,
    class_of,
    loss_of,
    model_of,
    output_of,
)

CHUNKS = 2

#: Float32 inside of transformers' norms and rotary tables; other micro-batches round differently.
TOLERANCE = 1e-12

#: A case, and whether embedding and head share their matrix.
Kind = tuple[str, bool]


@functools.cache
def truth_of(name, form="both", tied=None):
    """Return the loss and the gradients of the plain model over the same micro-batches."""
    model = model_of(name, **_tying(tied))
    batch, labels = batch_of(name, form=form)
    size = -(-len(labels) // CHUNKS)
    loss_fn = loss_of(name)
    loss = sum(
        loss_fn(
            output_of(model, {key: value[k : k + size] for key, value in batch.items()}),
            labels[k : k + size],
        )
        * (loss_fn.num_counted(labels[k : k + size]).item() / loss_fn.num_counted(labels).item())
        for k in range(0, len(labels), size)
    )
    loss.backward()
    gradients = {
        key: parameter.grad for key, parameter in model.named_parameters(remove_duplicate=False)
    }
    return loss.detach(), gradients, dict(model.named_buffers())


def _tying(tied):
    return {} if tied is None else {"tie_word_embeddings": tied}


def step_of(stage, keys, name, form="both"):
    """Run a step; return the loss, and this stage's gradients and buffers by key."""
    batch, labels = batch_of(name, form=form)
    loss = stage.step(**batch, labels=labels)
    named = stage.named_parameters(remove_duplicate=False)
    return (
        loss,
        {keys(key): parameter.grad for key, parameter in named},
        {keys(key): buffer for key, buffer in stage.named_buffers()},
    )


def assert_same(found, expected, what):
    """Compare losses, gradients and buffers, each with the name of what differs."""
    loss, gradients, buffers = expected
    assert abs(found[0] - loss) <= TOLERANCE, what
    for key, gradient in found[1].items():
        if gradients[key] is None:
            assert gradient is None or not gradient.any(), (what, key)
        else:
            difference = (gradient - gradients[key]).abs().max()
            assert difference <= TOLERANCE * (1 + gradients[key].abs().max()), (what, key)
    for key, buffer in found[2].items():
        assert torch.equal(buffer, buffers[key]), (what, key)


def even(num_layers, number):
    """Return a balance of parts of about the same number of layers."""
    ends = [num_layers * k // number for k in range(number + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


# -- the table of docs/language_models.md --------------------------------------------------------


def kinds_of(names: Iterable[str]) -> list[Kind]:
    """Return the cases of these names, each tied and untied where its class can be both."""
    untieable = ("BERT", "BERT, tokens")
    return [(name, tied) for name in names for tied in (False, True)[: 1 + (name not in untieable)]]


def rows_of(ranks: Any, names: list[str], numbers: Iterable[int], folder: Path) -> dict[str, str]:
    """Compare cases; return, for each, what is not equal, or "" if all is."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for number in numbers:
        kinds = kinds_of(names)
        parts = ranks(number).run(run_all, kinds, folder, world=False, timeout_s=600).values()
        for kind in kinds:
            faults = [
                fault
                for rank, of_rank in enumerate(parts)
                for fault in differences(kind, of_rank[kind], f"{number} processes, rank {rank}")
            ]
            faults += of_folder(kind, folder / f"{kind[0]} {kind[1]}")
            found[kind[0]] += faults
    return {name: "; ".join(faults) for name, faults in found.items()}


def run_all(bare, kinds, folder):
    """Run steps of all forms, save and generate, for every case; return what was found."""
    return {kind: run_one(bare, kind, folder) for kind in kinds}


def run_one(bare, kind, folder):
    name, tied = kind
    layers: Any = hf.sequential(model_of(name, **_tying(tied)))
    some = replace(bare, num_ranks=bare.num_ranks)
    options = {"chunks": CHUNKS, "loss_fn": loss_of(name)}
    found: dict[str, Any] = {}
    balance = even(len(layers), bare.num_ranks)
    with stage_of(some, f"{kind}", layers, balance, **options) as stage:
        for form in batches_of(name):
            found[form] = step_of(stage, layers.keys, name, form)
            stage.zero_grad()
        if bare.rank == 0:
            shutil.rmtree(folder / f"{name} {tied}", ignore_errors=True)
        hf.save_pretrained(stage, folder / f"{name} {tied}")
        if _generates(name):
            found["tokens"] = hf.generate(stage, **_prompts(name)).tolist()
    return found


def _generates(name):
    return class_of(name).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _prompts(name):
    tokens = torch.randint(3, 31, (5, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(tokens)
    if "left" in batches_of(name):
        mask[1, :3] = mask[3, :1] = 0
    options = {"max_new_tokens": 5, "do_sample": False}
    return {"input_ids": tokens * mask, "attention_mask": mask, **options}


@functools.cache
def _tokens_of(kind):
    model = model_of(kind[0], **_tying(kind[1])).eval()
    model.config.output_router_logits = False  # transformers cannot generate with it
    return model.generate(**_prompts(kind[0])).tolist()


def differences(kind, found, where):
    """Describe what of one rank's results is not transformers'."""
    name, tied = kind
    what = f"{'tied' if tied else 'untied'}, {where}"
    faults = []
    for form in batches_of(name):
        try:
            assert_same(found[form], truth_of(name, form, tied), f"{what}, {form}")
        except AssertionError as error:
            faults.append(str(error).partition("\n")[0])
    if "tokens" in found and found["tokens"] != _tokens_of(kind):
        faults.append(f"{what}: greedy tokens differ")
    return faults


def of_folder(kind, folder):
    """Describe what of a folder that was saved is not the model of a case."""
    name, tied = kind
    again = class_of(name).from_pretrained(folder, experts_implementation="eager").eval()
    plain = model_of(name, **_tying(tied)).eval()
    batch, _ = batch_of(name)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        ours, theirs = (output_of(model, batch) for model in (again, plain))
    ours, theirs = (value[0] if isinstance(value, tuple) else value for value in (ours, theirs))
    is_same = (ours - theirs).abs().max() <= TOLERANCE
    return [] if is_same else [f"{'tied' if tied else 'untied'}: {folder.name} is another model"]


def table(found: dict[str, str]) -> str:
    """Return the table of the page, in Markdown."""
    lines = ["| model | class | padding | packed | tied | tokens |", "|---|---|---|---|---|---|"]
    for name, fault in found.items():
        forms = batches_of(name)
        padding = " and ".join(form for form in forms if form != "packed")
        is_both = len(kinds_of([name])) == 2
        cells = [
            *(name, f"`{class_of(name).__name__}`", padding, "yes" if "packed" in forms else "-"),
            *("both" if is_both else "-", "yes" if _generates(name) else "-"),
        ]
        lines.append(f"| {' | '.join(cells)} |" + (f" DIFFERS: {fault}" if fault else ""))
    return "\n".join(lines)


def names() -> list[str]:
    """Return the cases of the table: one of each class, tied and untied being two of one."""
    return [name for name in CASES | MORE if not name.endswith((", tied", ", untied"))] + [
        "BERT, tied"
    ]
