"""Compares models as pipelines of one, two and three processes with transformers, in float64.

For each case, tied or untied: what ``hf.load_pretrained`` reads has the loss and gradients of a
mini-batch of each form, and greedy tokens; what ``hf.save_pretrained`` writes has the logits.
"""

from __future__ import annotations

import functools
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from procpipe import hf
from tests.cutting.compare import buffers_of, even, gradients_of
from tests.dist.stages import stage_of
from tests.hf.cases import (
    LEFT,
    PACKED,
    RIGHT,
    batch_of,
    batches_of,
    class_of,
    config_of,
    loss_of,
    model_of,
    output_of,
)

CHUNKS = 2

#: By the number of processes.
SCHEDULES = {1: "gpipe", 2: "1f1b", 3: "zb-h1"}

#: Float32 inside of transformers' norms and rotary tables; other micro-batches round differently.
TOLERANCE = 1e-12

_GREEDY = {"max_new_tokens": 5, "do_sample": False}

#: A case, and whether embedding and head share their matrix.
Kind = tuple[str, bool]


@functools.cache
def truth_of(name, form="both", tied=None):
    """Return loss, gradients and buffers of the plain model over the same micro-batches."""
    model, (batch, labels) = model_of(name, **tying(tied)), batch_of(name, form=form)
    size, loss_fn = -(-len(labels) // CHUNKS), loss_of(name)
    total = loss_fn.num_counted(labels).item()
    loss: Any = 0.0
    for k in range(0, len(labels), size):
        part = {key: value[k : k + size] for key, value in batch.items()}
        share = loss_fn.num_counted(labels[k : k + size]).item() / total
        loss = loss + share * loss_fn(output_of(model, part), labels[k : k + size])
    loss.backward()
    return loss.detach(), gradients_of(model), buffers_of(model)


def tying(tied):
    """Return what of a configuration says whether embedding and head share their matrix."""
    return {} if tied is None else {"tie_word_embeddings": tied}


def step_of(stage, keys, name, form="both"):
    """Run a step; return the loss, and this stage's gradients and buffers by key."""
    batch, labels = batch_of(name, form=form)
    loss = stage.step(**batch, labels=labels)
    return loss, gradients_of(stage, keys), buffers_of(stage, keys)


def assert_same(found, expected, what, tolerance=TOLERANCE):
    """Compare losses, gradients and buffers, each with the name of what differs."""
    loss, gradients, buffers = expected
    assert abs(found[0] - loss) <= tolerance, what
    for key, gradient in found[1].items():
        if gradients[key] is None:
            assert gradient is None or not gradient.any(), (what, key)
        else:
            difference = (gradient - gradients[key]).abs().max()
            assert difference <= tolerance * (1 + gradients[key].abs().max()), (what, key)
    for key, buffer in found[2].items():
        assert torch.equal(buffer, buffers[key]), (what, key)


def on_meta(name, **others):
    """Return the layers of a case, built on the meta device."""
    with torch.device("meta"):
        model = class_of(name)(config_of(name, **others)).double()
    return hf.sequential(model)


# -- the classes of docs/language_models.md ------------------------------------------------------


def kinds_of(names: Iterable[str]) -> list[Kind]:
    """Return the cases of these names, each tied and untied where its class can be both."""
    untieable = ("BERT", "BERT, tokens")
    return [(name, tied) for name in names for tied in (False, True)[: 1 + (name not in untieable)]]


def rows_of(ranks: Any, kinds: list[Kind], numbers: Iterable[int], folder: Path) -> dict[str, str]:
    """Compare cases; return, for each name, what is not equal, or "" if all is."""
    found: dict[str, list[str]] = {name: [] for name, _ in kinds}
    for name, tied in kinds:
        model_of(name, **tying(tied)).save_pretrained(
            folder / f"{name} {tied}", max_shard_size="9KB"
        )
    for number in numbers:
        parts = ranks(number).run(run_all, kinds, folder, world=False, timeout_s=600).values()
        for kind in kinds:
            faults = [
                fault
                for rank, of_rank in enumerate(parts)
                for fault in differences(kind, of_rank[kind], f"{number} processes, rank {rank}")
            ]
            keys = set().union(*(of_rank[kind][RIGHT][1] for of_rank in parts))
            if keys != truth_of(kind[0], RIGHT, kind[1])[1].keys():
                faults.append(f"{number} processes do not have all gradients")
            found[kind[0]] += faults + of_folder(kind, folder / f"{kind[0]} {kind[1]}", number)
    return {name: "; ".join(faults) for name, faults in found.items()}


def run_all(bare, kinds, folder):
    """Load, run steps of all forms, generate, and save, for every case; return what was found."""
    return {kind: run_one(bare, kind, folder / f"{kind[0]} {kind[1]}") for kind in kinds}


def run_one(bare, kind, folder):
    name, tied = kind
    layers: Any = on_meta(name, **tying(tied))
    balance, schedule = even(len(layers), bare.num_ranks), SCHEDULES[bare.num_ranks]
    options = {"chunks": CHUNKS, "schedule": schedule, "loss_fn": loss_of(name)}
    found: dict[str, Any] = {}
    with stage_of(bare, f"{kind}", layers, balance, **options) as stage:
        hf.load_pretrained(stage, folder)
        for form in batches_of(name):
            found[form] = step_of(stage, layers.keys, name, form)
            stage.zero_grad()
        if _generates(name):
            found["tokens"] = hf.generate(stage, **prompts_of(name), **_GREEDY).tolist()
        hf.save_pretrained(stage, folder)  # what is there is replaced
    return found


def _generates(name):
    return class_of(name).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def prompts_of(name):
    """Return prompts, some of them padded on the left, and their mask, by name."""
    tokens = torch.randint(3, 31, (5, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(tokens)
    if LEFT in batches_of(name):
        mask[1, :3] = mask[3, :1] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def plain_of(name, tied=None):
    """Return the plain model, which generates; transformers cannot with logits of routers."""
    model = model_of(name, **tying(tied)).eval()
    model.config.output_router_logits = False
    return model


@functools.cache
def _tokens_of(kind):
    return plain_of(*kind).generate(**prompts_of(kind[0]), **_GREEDY).tolist()


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


def of_folder(kind, folder, number):
    """Describe what of a folder that was saved is not the model of a case, in so many files."""
    name, tied = kind
    files = [*folder.glob("model*.safetensors")]
    keys = [key for file in files for key in safe_open(file, "pt").keys()]  # noqa: SIM118
    if len(files) != number or len({*keys}) != len(keys):
        return [f"{folder.name} has other files, too, or has a matrix twice"]
    again, plain = read_again(name, folder), model_of(name, **tying(tied))
    with warnings.catch_warnings(action="ignore"):
        is_same = (logits_of(again, name) - logits_of(plain, name)).abs().max() <= TOLERANCE
    return [] if is_same else [f"{'tied' if tied else 'untied'}: {folder.name} is another model"]


def read_again(name, folder):
    """Return the model that transformers reads."""
    return class_of(name).from_pretrained(folder, experts_implementation="eager")


def logits_of(model, name):
    """Return the logits of a plain model, or of a stage, in eval mode."""
    batch, _ = batch_of(name)
    with torch.no_grad():
        is_stage = isinstance(model.eval(), torch.nn.Sequential)
        output = model(**batch) if is_stage else output_of(model, batch)
    return output[0] if isinstance(output, tuple) else output


def summary(names: Iterable[str]) -> str:
    """Return what the page says of classes, in Markdown: those that have all, and the others."""
    complete, others = [], ["| class | without |", "|---|---|"]
    for name in names:
        has = {
            "padding on the left": LEFT in batches_of(name),
            "packed": PACKED in batches_of(name),
            "tied": len(kinds_of([name])) == 2,
            "tokens": _generates(name),
        }
        class_name = f"`{class_of(name).__name__}`"
        without = ", ".join(what for what, there in has.items() if not there)
        if without:
            others.append(f"| {class_name} | {without} |")
        else:
            complete.append(class_name)
    return "\n".join([textwrap.fill(", ".join(complete), 110), "", *others])
