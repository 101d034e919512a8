"""The examples, run as a user would: any number of stages and any balance give the same losses.

So no example of procpipe may have a branch on the rank: their source is searched for that.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases import for_each
from tests.dist.forks import OF_HF, fork_server
from tests.dist.script import run_forked

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples/train_digits.py"
LM = ROOT / "examples/train_lm.py"
HF = ROOT / "examples/finetune_hf.py"
TINY = ROOT / "examples/tiny_pipeline.py"  # shows what procpipe does; it does not use it

#: Numbers of stages, and balances.
WAYS = [
    pytest.param(2, {DIGITS: [], LM: []}, id="2"),
    pytest.param(2, {DIGITS: [3, 13], LM: [5, 2]}, id="2-uneven", marks=pytest.mark.on_gpus(2)),
    pytest.param(3, {DIGITS: [7, 8, 1], LM: [1, 5, 1]}, id="3", marks=pytest.mark.on_gpus(3)),
]

FEW_STEPS = {
    DIGITS: ["--epochs", "1"],
    LM: ["--steps", "3", "--evaluate-every", "2", "--batch-size", "4", "--generate", "12"],
}


#: Enough to recognise the digits.
WHOLE = ["--epochs", "3"]


def results(stdout):
    """Return all lines except the first, which has the balance, and the tables of the stages."""
    found = []
    is_table = False
    for line in stdout.splitlines()[1:]:
        is_table = bool(line.strip()) and (is_table or line.startswith(("stage", "the last step")))
        if line.strip() and not is_table:
            found.append(line)
    return found


def without_balance(stdout):
    return [line for line in stdout.splitlines() if line and ", balance [" not in line]


def run(example, *, nproc=None, balance=(), args=None):
    options = [*(FEW_STEPS[example] if args is None else args)]
    if balance:
        options += ["--balance", *map(str, balance)]
    return run_forked(example, num_ranks=nproc, args=options).check()


@pytest.fixture(scope="module")
def in_one_stage():
    """Give each example's results without a launcher."""
    return {example: results(run(example).stdout) for example in (DIGITS, LM)}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("example", [DIGITS, LM], ids=lambda path: path.stem)
@pytest.mark.parametrize(("nproc", "balance"), WAYS)
def test_any_number_of_stages_prints_the_same(example, nproc, balance, in_one_stage):
    balance = balance[example]
    is_whole = example == DIGITS and not balance
    done = run(example, nproc=nproc, balance=balance, args=WHOLE if is_whole else None)

    found, expected = results(done.stdout), in_one_stage[example]
    assert expected
    if is_whole:  # the first epoch is that of one stage, and the digits are recognised at the end
        assert found[-1].startswith("epoch  3")
        assert float(found[-1].rsplit(maxsplit=1)[1].rstrip("%")) >= 97.0
        assert len(found) == 3
        found = found[: len(expected)]
    assert found == expected


@pytest.mark.dist
@pytest.mark.slow
def test_a_language_model_is_trained_resumed_and_adapted(tmp_path):
    pytest.importorskip("peft")
    fork_server().load(*OF_HF)
    few = ["--batch-size", "4", "--every", "2", "--paragraphs", "60", "--generate", "4"]
    printed = {}
    for num_ranks in (None, 2):
        folder = tmp_path / str(num_ranks)
        whole = run(HF, nproc=num_ranks, args=[*few, "--steps", "4", "--out", str(folder / "out")])
        saving = [*few, "--state", str(folder / "state")]
        first = run(HF, nproc=num_ranks, args=[*saving, "--steps", "2"])
        second = run(HF, nproc=2 if num_ranks is None else None, args=[*saving, "--steps", "4"])
        lines = [without_balance(done.stdout) for done in (whole, first, second)]
        assert lines[1][:1] + lines[2] == lines[0], "resumed on another number of stages"
        lora = ["--model", str(folder / "out"), "--lora", "--out", str(folder / "adapter")]
        adapted = run(HF, nproc=num_ranks, args=[*few, *lora, "--steps", "2"])
        printed[num_ranks] = lines[0], without_balance(adapted.stdout)
        assert (folder / "adapter" / "adapter_config.json").is_file()
    assert printed[None] == printed[2]


@pytest.mark.dist
def test_an_ordinary_gpt_is_cut_as_it_is():
    plain, cut = ROOT / "examples/train_nanogpt_plain.py", ROOT / "examples/train_nanogpt.py"
    texts = [path.read_text() for path in (plain, cut)]
    classes = [text[text.index("class Block") : text.index("def main")] for text in texts]
    assert classes[0] == classes[1]
    assert len(texts[1].splitlines()) <= len(texts[0].splitlines()) + 10
    few = ["--steps", "4", "--batch-size", "4"]

    expected = run_forked(plain, args=few).check().stdout
    found = run_forked(cut, num_ranks=2, args=few).check().stdout

    assert expected.startswith("step    4   bits per byte")
    assert without_balance(found) == expected.splitlines()


@for_each("example", sorted({*ROOT.glob("examples/*.py")} - {TINY}), ids=lambda path: path.stem)
def test_no_example_uses_its_rank(example):
    assert mentions_of_rank(example.read_text()) == []


@for_each(
    ("code", "lines"),
    [
        ("if stage.rank == 0: pass", [1]),
        ("x = 1\ny = 2 if int(os.environ['RANK']) else 3", [2]),
        ("from torch.distributed import get_rank", [1]),
        ("def f(local_rank): pass", [1]),
        ('"""Says that every rank runs this."""\nprint(1)', []),
    ],
)
def test_a_rank_is_found_in_code_but_not_in_docstrings(code, lines):
    assert mentions_of_rank(code) == lines


def mentions_of_rank(code):
    """Return the lines of code, docstrings apart, that mention a rank in a name or a string."""
    tree = ast.parse(code)
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, scopes) and ast.get_docstring(node) is not None
    }
    nodes: list[ast.AST] = [tree]
    mentions: set[int] = set()
    while nodes:
        node = nodes.pop()
        if any(isinstance(text, str) and "rank" in text.lower() for text in vars(node).values()):
            mentions.add(vars(node).get("lineno", 0))
        nodes += [child for child in ast.iter_child_nodes(node) if child not in docstrings]
    return sorted(mentions)
