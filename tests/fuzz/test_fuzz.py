"""New random cases in each run; and the fuzzer's own: what it draws, detects and prints.

``PROCPIPE_FUZZ_SEED`` makes a run draw the cases of that seed; the first lines of each run name it.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections import Counter

import pytest

from tests.conftest import FUZZ_SEED
from tests.dist.forks import ROOT
from tests.dist.pool import Pool
from tests.dist.report import RanksFailedError
from tests.fuzz.__main__ import main
from tests.fuzz.case import (
    ACTS,
    BETWEEN,
    EVALUATION,
    GROUPS,
    INPUTS,
    LOSSES,
    SCHEDULES,
    WORDS,
    Case,
    Run,
    draw,
    simpler,
)
from tests.fuzz.compare import run_one
from tests.fuzz.judge import explain, fault_of
from tests.fuzz.layers import LAYERS

NUM_CASES = 12

#: On two ranks, with every kind of layer whose results must be the same to the last bit.
EXACT = Case(
    seed=3,
    layers=("linear", "stash.6", "relu_", "dict", "counting", "checkpoint", "pop.6", "ids"),
    runs=(
        Run(
            cuts=(3,),
            chunks=3,
            schedule="1f1b",
            checkpoint="always",
            calls=(
                *(("step", ((8,),)), ("update", ()), ("step of several", ((13,),))),
                ("output in inference mode", ((4,),)),
            ),
        ),
    ),
    loss="classes",
)

#: One that saves on two stages, of which the first has nothing of one group, and resumes on two
#: replicas of two, which find how often a layer adds to a gradient, and then on three stages.
RESUMED = Case(
    seed=4,
    layers=("tied", "reentrant", "varying", "linear", "tied", "linear*"),
    runs=(
        Run(cuts=(2,), calls=(("step", ((5,),)), ("clip", (0,)), ("update", ()))),
        Run(cuts=(3,), replicas=2, chunks=2, calls=(("loop", ((3, 4), (5, 2))), ("update", ()))),
        Run(cuts=(2, 5), calls=(("step", ((4,),)), ("update", ()))),
    ),
    optimizer="adamw",
    groups="both",
    scheduler="steps",
    scale=8.0,
)


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_random_cases_equal_the_plain_model(pool):
    seed = int(os.environ[FUZZ_SEED])
    faults = {number: fault_of(pool, draw(seed, number)) for number in range(NUM_CASES)}
    failed = [(number, fault) for number, fault in faults.items() if fault]
    if failed:
        number, fault = failed[0]
        text = explain(pool, seed, number, draw(seed, number), fault)
        others = [other for other, _ in failed[1:]]
        pytest.fail(f"{text}\nother cases that fail: {others}", pytrace=False)


def test_two_known_cases_equal_the_plain_model(pool):
    assert fault_of(pool, EXACT) is None
    assert fault_of(pool, RESUMED) is None


def test_the_cases_cover_all_options():
    many = [draw(0, number) for number in range(1000)]
    runs = [run for case in many for run in case.runs]
    words = {kind for case in many for kind in case.kinds}
    assert {word for word in words if "." not in word} == set(WORDS) == set(LAYERS)
    assert {act for run in runs for act, _ in run.calls} == ACTS
    assert {run.schedule for run in runs} == set(SCHEDULES)
    counts = Counter((run.num_stages, run.replicas) for run in runs)
    assert set(counts) == {(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3)}
    for name, values in (("inputs", INPUTS), ("loss", LOSSES), ("groups", GROUPS)):
        assert {getattr(case, name) for case in many} == set(values)
    assert 100 <= sum(case.is_exact for case in many) <= 500
    assert sum(len(case.runs) > 1 and case.groups != "one" for case in many) > 50
    with_two = [call for run in runs if run.replicas == 2 for call in run.calls]
    acts = Counter(act for act, _ in with_two)
    assert acts["loss"] > 10
    assert sum(acts[act] for act in EVALUATION) > 50
    ended = [act for act, sizes in with_two if act not in BETWEEN and 0 in sum(sizes, ())]
    assert len(ended) > 10  # the loader of a replica has ended before the other
    assert sum(case.kinds.count("tied") > 2 for case in many) > 30
    assert sum(case.is_deferred and "batchnorm" in case.kinds for case in many) > 30


def test_a_case_is_drawn_the_same_is_valid_and_can_be_made_simpler():
    cases = [draw(5, number) for number in range(100)]
    assert len(set(cases)) == 100
    for number, case in enumerate(cases):
        assert case.is_valid()
        assert draw(5, number) == case == eval(str(case), {"Case": Case, "Run": Run})
        found = [*simpler(case)]
        assert found
        assert case not in found


@pytest.mark.parametrize(
    ("change", "truth", "message"),
    [
        ({}, {"loss": "tokens"}, "shape|size"),
        ({}, {"is_weighted": True}, "loss: off by"),
        ({}, {"schedule": "gpipe"}, "gradients.*: off by .*e-1[789]"),
        ({"layers": ("batchnorm",)}, {"is_deferred": True}, "state.*running_mean.*: off by"),
        ({"layers": ("linear",)}, {"groups": "decay"}, "options of groups"),
    ],
)
def test_a_difference_is_detected(ranks, tmp_path, change, truth, message):
    assert EXACT.is_exact
    case = with_(EXACT, **change, cuts=(1,)) if change else EXACT
    outcomes = ranks(2).run(
        run_one, case, 0, str(tmp_path), truth=with_(case, **truth), world=False
    )
    with pytest.raises(RanksFailedError, match=message):
        outcomes.values()


def with_(case, **changes):
    """Change fields of a case, or of its only run."""
    of_run = {field.name for field in dataclasses.fields(Run)} & changes.keys()
    run = dataclasses.replace(case.runs[0], **{name: changes.pop(name) for name in of_run})
    return dataclasses.replace(case, runs=(run,), **changes)


def test_a_failure_is_made_smaller_and_printed_as_a_command_that_repeats_it(pool, capsys):
    wrong = dataclasses.replace(RESUMED, layers=("affine", "unknown", "linear", "gru"))
    fault = fault_of(pool, wrong)
    assert fault
    text = explain(pool, 1, 2, wrong, fault)
    assert "--seed 1 --case 2" in text
    (small,) = re.findall(r'--this "(.*)"', text)
    assert small == "Case(seed=4, layers=('unknown',), runs=(Run(calls=()),))"
    assert main(["--this", small]) == 1
    assert "rank 0: KeyError: 'unknown'" in capsys.readouterr().out


def test_the_oracle_imports_nothing_of_procpipe():
    names, waiting = set(), {"tests.fuzz.oracle"}
    while waiting:
        names.add(name := waiting.pop())
        text = (ROOT / f"{name.replace('.', '/')}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            imported = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(each.startswith("procpipe") for each in imported), name
            waiting |= {each for each in imported if each.startswith("tests.")} - names
    assert len(names) > 3
