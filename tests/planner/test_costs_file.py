"""Costs as text: written costs are read back, and each fault is an error with its place."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from procpipe.planner.costs_file import Measured, from_text, to_text
from procpipe.planner.model import Layer, Link, Model, Skip, TiedLayers
from tests.cases import for_each

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"

LAYER = Layer(
    "0", (0.1, 0.2), (0.3, 0.4), (5.0, 6.0), (0.1, 0.2), (1.0, 2.0), (3.0, 4.0), (5.0, 6.0),
    (7.0, 8.0), is_in_place=True, parameter_bytes=9, trained_bytes=8, type="Linear",
)  # fmt: skip
MODEL = Model(
    (2, 4), (LAYER, Layer("1", (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), parameter_bytes=1)), LAYER,
    (Skip(0, (1,), (1.0, 2.0), (3.0, 4.0)),), (1.0, 2.0), (3.0, 4.0), (0.5, 0.25), ((0, 1),),
    (TiedLayers("0.buffer", (0, 1), 1, is_trained=False),),
)  # fmt: skip


@pytest.mark.parametrize("link", [Link(), Link(1e-5, 2e10)])
def test_written_costs_are_read_back(link: Link) -> None:
    for replica_link in (None, Link(1e-4, 1e9)):
        measured = Measured(MODEL, 64, link, "a device", replica_link)

        assert from_text(to_text(measured)) == measured


def test_optional_entries_may_be_left_out() -> None:
    text = '{"procpipe layer costs": 1, "samples": [8], "layers": [{"name": "a", "forward_s": [1],'
    text += ' "backward_s": [2], "output_bytes": [3]}]}'

    assert from_text(text) == Measured(
        Model((8,), (Layer("a", (1.0,), (2.0,), (3.0,)),)), 8, Link()
    )


def test_layers_that_an_earlier_version_says_share_a_parameter_are_kept_together() -> None:
    whole = json.loads(to_text(Measured(MODEL, 64, Link())))
    del whole["ties"]

    model = from_text(json.dumps(whole)).model

    assert model == replace(MODEL, ties=())
    assert model.groups == (2,)


def test_null_equals_a_missing_entry() -> None:
    whole = json.loads(to_text(Measured(MODEL, 64, Link())))
    whole.update(loss=None, skips=None)

    assert from_text(json.dumps(whole)).model == replace(MODEL, loss=None, skips=())


def test_the_example_of_the_documentation() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)

    measured = from_text(example)

    assert len(measured.model.layers) == 2
    assert measured.batch == 64


def test_every_entry_is_documented() -> None:
    page = PAGE.read_text()
    entries = json.loads(to_text(Measured(MODEL, 64, Link(1, 2), "a device")))
    records = (entries["layers"][0], entries["skips"][0], entries["ties"][0], entries["link"])
    names = set(entries).union(*records)

    assert [name for name in sorted(names) if name not in page] == []


WRONG = [
    (lambda whole: whole.update({"procpipe layer costs": 2}), "it is of another version than 1"),
    (lambda whole: whole.pop("procpipe layer costs"), 'it has no "procpipe layer costs": 1'),
    (lambda whole: whole.pop("samples"), "samples is missing"),
    (
        lambda whole: whole.update(samples=[4, 2]),
        "samples: [4, 2] are not sizes in ascending order",
    ),
    (lambda whole: whole.update(samples=[0, 2]), "samples[0]: must be at least 1"),
    (lambda whole: whole.update(layers=[]), "layers: there is none"),
    (lambda whole: whole.update(layers={}), "layers: {} is not a list"),
    (lambda whole: whole.update(layers=[3]), "layers[0]: 3 is not an object in braces"),
    (lambda whole: whole.update(colour=1), "the top: there is no such entry as 'colour'"),
    (lambda whole: whole.update(batch=1.5), "batch: 1.5 is not a whole number from 0"),
    (lambda whole: whole.update(link={"bytes_per_s": 0}), "link.bytes_per_s: at 0 bytes a second"),
    (lambda whole: whole.update(start_s=[1]), "start_s: [1] is not a list of 2 numbers"),
    (lambda whole: whole["layers"][1].pop("name"), "layers[1].name is missing"),
    (
        lambda whole: whole["layers"][1].update(size=1),
        "layers[1]: there is no such entry as 'size'",
    ),
    (lambda whole: whole["layers"][1].update(name=1), "layers[1].name: 1 is not a text"),
    (
        lambda whole: whole["layers"][1].update(forward_s=[1]),
        "layers[1].forward_s: [1] is not a list of 2 numbers",
    ),
    (
        lambda whole: whole["layers"][1].update(forward_s=[1, -1]),
        "layers[1].forward_s: -1 is not a finite number from 0",
    ),
    (
        lambda whole: whole["layers"][1].update(is_in_place=1),
        "layers[1].is_in_place: 1 is neither true nor false",
    ),
    (
        lambda whole: whole["skips"][0].update(destinations=[2]),
        "skips[0]: layers (2,) do not come after layer 0",
    ),
    (
        lambda whole: whole["skips"][0].update(destinations=[0]),
        "skips[0]: layers (0,) do not come after layer 0",
    ),
    (
        lambda whole: whole["skips"][0].update(destinations=[]),
        "skips[0].destinations: there is none",
    ),
    (
        lambda whole: whole["layers"][1].update(forward_s=[1, 10**400]),
        "layers[1].forward_s: 1000000000000000000000000000000000000... is too large to be right",
    ),
    (
        lambda whole: whole["layers"][1].update(forward_s=[1, 1e308]),
        "layers[1].forward_s: 1e+308 is too large to be right",
    ),
    (lambda whole: whole.update(batch=10**20), "batch: 100000000000000000000 is too large"),
    (
        lambda whole: whole.update(link={"bytes_per_s": 1e-320}),
        "link.bytes_per_s: at 9.99989e-321 bytes a second nothing arrives",
    ),
    (
        lambda whole: whole.update({"procpipe layer costs": True}),
        "it is of another version than 1",
    ),
    (
        lambda whole: whole["layers"][0].update(trained_bytes=10),
        "layers[0].trained_bytes: 10 is more than parameter_bytes, 9, of which it is a part",
    ),
    (
        lambda whole: whole["layers"][0].update(input_gradient_s=[0.1, 0.5]),
        "layers[0].input_gradient_s: [0.1, 0.5] is more than backward_s, [0.3, 0.4]",
    ),
    (lambda whole: whole.update(shared=[[0, 2]]), "shared[0]: [0, 2] are not two of 2 layers"),
    (lambda whole: whole["ties"][0].update(layers=[0]), "ties[0].layers: [0] are not several of 2"),
    (lambda whole: whole["ties"][0].update(layers=[1, 0]), "ties[0].layers: [1, 0] are not severa"),
    (lambda whole: whole["ties"][0].update(layers=[0, 2]), "ties[0].layers: [0, 2] are not severa"),
    (
        lambda whole: whole["ties"][0].update(num_bytes=2),
        "ties[0].num_bytes: 2 is more than parameter_bytes of layer 1, 1, of which it is a part",
    ),
    (
        lambda whole: whole["ties"][0].update(is_trained=True),
        "ties[0].num_bytes: 1 is more than trained_bytes of layer 1, 0, of which it is a part",
    ),
    (lambda whole: whole.update(shared=[[1, 1]]), "shared[0]: [1, 1] are not two of 2 layers"),
]


@for_each(("corrupt", "message"), WRONG, ids=[message for _, message in WRONG])
def test_each_fault_is_reported_with_its_place(corrupt, message: str) -> None:
    whole = json.loads(to_text(Measured(MODEL, 64, Link())))
    corrupt(whole)

    with pytest.raises(ValueError, match=re.escape(message)):
        from_text(json.dumps(whole))


@for_each("text", ["", "{", "[1]", "3", '{"a": 1}', "[" * 100_000])
def test_text_that_is_no_file_of_costs_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is not JSON|it has no|it is nested too deeply"):
        from_text(text)
