"""The code in the documentation runs, and the names in it exist."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from procpipe.launch.main import main
from procpipe.launch.plan import subject, trial
from procpipe.plan.schedules.interleaved import interleaved
from procpipe.plan.schedules.zero_bubble import zb_v
from procpipe.timeline.text import render_text
from tests.cutting.cases import CASES
from tests.dist.forks import OF_HF, fork_server
from tests.dist.script import run_forked
from tests.launch.started import start_as_forks

ROOT = Path(__file__).parents[1]

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_in(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.DOTALL)


def printed(program: str, num_ranks: int | None = None) -> str:
    return run_forked(program, num_ranks=num_ranks).check().stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("https:"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_a_new_program_on_a_page_needs_a_test_that_runs_it():
    """A test below runs each of them, but for those of peers."""
    assert sum(len(blocks_in(str(page))) for page in PAGES) == 47
    (example,) = blocks_in("CONTRIBUTING.md")
    assert textwrap.dedent(example).strip() in text_of("tests/dist/test_pool.py")


@pytest.mark.dist
def test_the_readme_example_trains_and_has_no_branch_on_the_rank(tmp_path):
    training, with_own_loss, saving = blocks_in("README.md")
    assert "rank ==" not in training + with_own_loss + saving
    code = "import torch\ntorch.manual_seed(0)\n" + training
    code += "input, target = loader[0]\noptimizer.zero_grad()\n" + with_own_loss
    code += "optimizer.step()\n" + saving.replace("runs/digits", str(tmp_path)) * 2
    code += "stage.print('done')\n"
    done = run_forked(code, num_ranks=2).check()
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] + 0.1
    assert done.stdout.rstrip().endswith("done")
    assert len(list(tmp_path.glob("00000*-step-1"))) == 2


# -- programs that print the same on any number of stages ------------------------------------------

#: In float32 micro-batches change the last digits of a loss, and could change a printed one.
IN_FLOAT64 = "import torch\ntorch.set_default_dtype(torch.float64)\n"

LOOP, MODEL = blocks_in("docs/from_your_loop.md"), blocks_in("docs/your_model.md")

#: The programs with procpipe that stand beside those of peers.
BESIDE_PEERS = [each for each in blocks_in("docs/coming_from.md") if "from procpipe import" in each]
assert len(blocks_in("docs/coming_from.md")) == 2 * len(BESIDE_PEERS) == 6

#: A program with stages, one without any, and what they print.
SAME = {
    "the loop": (LOOP[1], LOOP[0], r"(epoch \d  loss \d\.\d{4}  accuracy \d\.\d{3}\n){5}"),
    "a mask passed along": (MODEL[4], "", r"(with.* \d+\.\d{4}\n){2}"),
    "skip tensors": (MODEL[5], "", r"(loss \d+\.\d{4}\n)+"),
    "as with torchgpipe": (BESIDE_PEERS[0], "", r"(loss \d+\.\d{4}\n)+"),
    "as with Pipe": (BESIDE_PEERS[1], "", r"(loss \d+\.\d{4}\n)+"),
    "as with pipelining": (BESIDE_PEERS[2], "", r"(loss \d+\.\d{4}\n)+"),
    "in float16": (*blocks_in("docs/mixed_precision.md"), "", r"(loss \d+\.\d{4}, scale \d+\n){5}"),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", SAME)
def test_a_program_prints_the_same_on_any_number_of_stages(name):
    program, plain, pattern = SAME[name]
    assert "rank ==" not in program
    if plain:
        program, plain = IN_FLOAT64 + program, IN_FLOAT64 + plain
    alone = printed(program)
    assert re.fullmatch(pattern, alone)
    assert printed(program, 2) == alone
    assert not plain or printed(plain) == alone


# -- docs/your_model.md ----------------------------------------------------------------------------


@pytest.mark.dist
def test_a_class_kept_as_it_is_trains_the_same_over_stages(tmp_path):
    of_gpt, ordinary, with_stages, back, *_ = MODEL

    def program(code: str, num_ranks: int | None = None) -> str:
        for name, place in (("exported", f"by {num_ranks}"), ("model.pt", "model.pt")):
            code = code.replace(f'"{name}"', repr(str(tmp_path / place)))
        return IN_FLOAT64 + code.replace("from gpt import GPT\n", of_gpt)

    expected = printed(program(ordinary))
    assert re.fullmatch(r"(loss \d\.\d{4}\n){10}", expected)
    for num_ranks in (None, 2):
        assert printed(program(with_stages, num_ranks), num_ranks) == expected
        exported = [load_file(f) for f in (tmp_path / f"by {num_ranks}").glob("*.safetensors")]
        assert len(exported) == (num_ranks or 1)
    names: dict[str, Any] = {}
    exec(of_gpt, names)
    gpt, plain = (names["GPT"]().double() for _ in range(2))
    gpt.load_state_dict({key: value for part in exported for key, value in part.items()})
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(gpt(tokens), plain(tokens), rtol=1e-9, atol=1e-9)
    printed(program(back, 2))


# -- docs/replicas.md ------------------------------------------------------------------------------

#: What the programs of docs/replicas.md find in place.
IN_PLACE = """
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from procpipe import Stage

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
loss_fn, batch_size, num_epochs = nn.functional.mse_loss, 4, 2
dataset = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
"""

SHOW_PARAMETERS = """
for name, parameter in stage.named_parameters():
    whole = parameter.full_tensor().flatten().tolist()
    if mesh["dp"].get_local_rank() == 0:
        print(",".join(map(str, [name, *whole])) + "\\n", end="", flush=True)
stage.close()
dist.destroy_process_group()
"""

TRAIN_ON_ALL = """
shares = [
    iter(DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, 2, dp)))
    for dp in range(2)
]
optimizer = torch.optim.AdamW(model.parameters())
for of_pipelines in zip(*shares, strict=True):
    torch.stack([loss_fn(model(input), target) for input, target in of_pipelines]).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.dist
def test_the_program_for_a_device_mesh_trains_as_one_model():
    (program,) = (block for block in blocks_in("docs/replicas.md") if "init_device_mesh" in block)
    dtype = torch.get_default_dtype()
    names: dict[str, object] = {}

    done = run_forked(IN_PLACE + program + SHOW_PARAMETERS, num_ranks=4).check()

    try:
        exec(IN_PLACE + TRAIN_ON_ALL, names)
    finally:
        torch.set_default_dtype(dtype)
    expected = dict(names["model"].named_parameters())  # type: ignore[attr-defined]
    lines = done.stdout.split()
    assert len(lines) == len(expected)
    for line in lines:
        name, *values = line.split(",")
        assert [float(v) for v in values] == pytest.approx(expected[name].flatten().tolist())


@pytest.mark.dist
def test_the_programs_for_replicas_print_the_same_on_any_number_of_stages():
    build, loop, evaluate, accumulate, *_ = blocks_in("docs/replicas.md")
    program = IN_PLACE + build + "optimizer = torch.optim.AdamW(stage.parameters())\n" + loop
    program += "test_loader = batches = [*loader]\n" + evaluate + "stage.train()\n" + accumulate
    program += "norm = stage.clip_grad_norm_(1.0)\nstage.print(f'{loss:.9f} {norm:.9f}')\n"
    found = [
        printed(program.replace("[3, 2, 2, 3]", balance), num_ranks)
        for balance, num_ranks in (("[5]", 2), ("[3, 2]", 4))
    ]
    assert re.fullmatch(r"\d\.\d{9} \d\.\d{9}\n", found[0])
    assert found[0] == found[1]


def test_the_simulation_of_all_reduces_prints_what_the_page_says(capsys):
    (program,) = (block for block in blocks_in("docs/replicas.md") if "simulate" in block)
    (printed,) = blocks_in("docs/replicas.md", "text")
    exec(program, {})
    assert capsys.readouterr().out == printed


# -- docs/timeline.md ------------------------------------------------------------------------------


@pytest.mark.dist
def test_the_timeline_of_the_recorded_program_has_the_tables_of_its_page(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks_in("docs/timeline.md")
    code = code.replace('"run.json"', repr(str(tmp_path / "run.json"))).replace(
        "range(20)", "range(3)"
    )
    done = run_forked(code, num_ranks=2).check()
    assert done.stdout.count("Split(stage=") == 2
    assert main(["timeline", "run.0.json", "run.1.json"]) == 0
    out = capsys.readouterr().out
    (shown,) = blocks_in("docs/timeline.md", "text")
    table, shown_table = (re.sub(r"[\d.]+", "0", text).split("\n\n")[:2] for text in (out, shown))
    assert [line.split() for line in table] == [line.split() for line in shown_table]
    assert out.endswith("\nrun.png\n")
    # The report has the table of the page.
    ours, theirs = (re.findall(r"^ +[01] .*%.*$", text, re.M)[-2:] for text in (done.stdout, out))
    assert ours == theirs


# -- docs/schedules.md -----------------------------------------------------------------------------


def test_a_users_own_schedule(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec("".join(blocks_in("docs/schedules.md")), {})
    assert "10   B2        B3\n" in capsys.readouterr().out
    assert Path("two_by_two.plan").read_text().startswith("plan m=4 n=2\nF0@0\nF1@0 F0@1\n")


def test_the_grids_of_the_page_are_those_of_the_schedules():
    page = text_of("docs/schedules.md")
    for plan, column in ((interleaved(4, 2, 2), 0), (zb_v(3, 2), 45)):
        drawn = [line[4 + column :][:40].rstrip() for line in page.splitlines()]
        for line in render_text(plan).splitlines()[1:]:
            words = line.split()
            assert words in [row.split() for row in drawn], line


# -- docs/planning.md ------------------------------------------------------------------------------


@pytest.mark.dist
def test_the_commands_of_planning_run(tmp_path, monkeypatch, capsys):
    (model,) = blocks_in("docs/planning.md")
    (commands,) = blocks_in("docs/planning.md", "sh")
    (tmp_path / "mymodel.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    monkeypatch.setattr(subject, "_BUDGET_S", 0.0)  # as few rounds as possible
    monkeypatch.setattr(trial, "_MAX_STEPS", 3)
    from_model, with_check = (shlex.split(line)[1:] for line in commands.splitlines())

    assert main([*from_model, "--estimate"]) == 0
    assert "\nstage = Stage(model, balance=[" in capsys.readouterr().out
    start_as_forks(monkeypatch, 4)
    assert main(with_check) == 0

    printed, _, compared = capsys.readouterr().out.partition("predicted and measured")
    (table,) = re.findall(r"predicted \(measured\).*?\n\n", printed, re.DOTALL)
    rows = table.splitlines()[2:-1]
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    times = [re.findall(r" \(([\d.]+) (m?s|µs)\) ", row) for row in rows]
    measured_s = [float(number) * units[unit] for ((number, unit),) in times]
    assert measured_s == sorted(measured_s)
    assert rows[0].split()[1] == "*", "the fastest is chosen"
    for what in ("step", "idle", r"\w+ 0, forward", r"\w+ 1, forward"):
        assert re.search(rf"{what} .*[\d.]+ *(s|ms|µs|%) .*%\n", compared), compared


# -- docs/launching.md -----------------------------------------------------------------------------


@pytest.mark.dist
def test_the_documented_script_goes_on_where_it_ended(tmp_path):
    """Also after a signal, under a launcher: tests/faults."""
    (code,) = blocks_in("docs/launching.md")
    assert '["epoch"] < 3' in code

    def losses(folder, num_epochs):
        script = code.replace("runs/", f"{tmp_path}/{folder}/").replace("< 3", f"< {num_epochs}")
        return re.findall(r"^loss \S+", printed(script, 2), re.MULTILINE)

    first, resumed, whole = losses("resumed", 1), losses("resumed", 2), losses("whole", 2)
    assert len(first) > 1
    assert first + resumed == whole


# -- docs/saved_state.md ---------------------------------------------------------------------------


@pytest.mark.dist
def test_the_code_of_saved_state_runs_on_two_stages_and_then_on_one(tmp_path):
    blocks = blocks_in("docs/saved_state.md")
    assert len(blocks) == 5
    code = "".join(blocks).replace("runs/", f"{tmp_path}/") + "stage.print(progress['step'])\n"
    assert printed(code, 2) == "24\n"
    saved = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert saved == ["000001-step-10", "000002-step-20", "000003"]
    for name in ("exported", "renamed"):
        shutil.rmtree(tmp_path / name)
    assert len(torch.load(tmp_path / "exported.pt", weights_only=True)) == 4
    (tmp_path / "exported.pt").unlink()
    # Again, in one process: nothing is left to train, so there is no input.
    again = code.replace("stage.step(input, target)  #", "#")
    assert printed(again.replace("[2, 2]", "[4]")) == "24\n"


# -- docs/language_models.md -----------------------------------------------------------------------

#: What a reader would look at; one write, so that lines of two processes do not mix.
LOOK = """
line = f"loss {loss.item():.5f}; perplexity {perplexity.item():.4f}; {texts.tolist()}"
print(line + "\\n", end="", flush=True)
"""


@pytest.mark.dist
def test_the_script_of_language_models_prints_the_same_on_one_process_and_on_two(tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.hf.cases import model_of

    fork_server().load(*OF_HF)
    code = "".join(blocks_in("docs/language_models.md"))
    assert "rank" not in code
    found = []
    for num_ranks in (None, 2):
        folder = tmp_path / str(num_ranks)
        plain = model_of("Llama", tie_word_embeddings=True).float()
        plain.save_pretrained(folder)
        start = f"import os, torch\nos.environ['FOLDER'] = {str(folder)!r}\ntorch.manual_seed(0)\n"

        lines = re.findall(r"^loss.*", printed(start + code + LOOK, num_ranks), re.MULTILINE)
        assert len(set(lines)) == 1, "each rank has the same"
        assert len(lines) == (num_ranks or 1)
        found.append(lines[0])
        trained = AutoModelForCausalLM.from_pretrained(folder / "out")
        assert not torch.equal(trained.lm_head.weight, plain.lm_head.weight)
        assert trained.lm_head.weight is trained.model.embed_tokens.weight
        assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert found[0] == found[1]


# -- docs/dev/peer_tests.md ------------------------------------------------------------------------


def test_every_test_of_the_checklist_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text_of("docs/dev/peer_tests.md"))
    assert len(named) > 100
    texts = {file: text_of(f"tests/{file}") for file, _ in named}
    assert [each for each in named if f"\ndef {each[1]}(" not in texts[each[0]]] == []


# -- docs/architecture.md --------------------------------------------------------------------------


def test_what_the_pipeline_in_one_file_leaves_out_is_where_it_says():
    file = text_of("examples/tiny_pipeline.py")
    listed = re.findall(r"procpipe/[\w/.]*\w/?", ast.get_docstring(ast.parse(file)) or "")
    assert len(listed) > 8
    assert [place for place in listed if not (ROOT / place).exists()] == []


def test_the_files_in_the_drawing_of_the_parts_exist():
    drawing = text_of("docs/architecture.md").partition("## The parts")[2].partition("\n## ")[0]
    files = re.findall(r"  (\w+(?:/\w+)?\.py)", drawing.partition("```\n")[2].partition("```")[0])
    assert len(files) >= 23
    assert [file for file in files if not (ROOT / "procpipe" / file).exists()] == []


def test_the_reading_path_takes_an_hour():
    table = text_of("docs/architecture.md")
    rows = re.findall(r"^\| \d+ \| `(procpipe/\S+)` \|", table, re.MULTILINE)
    assert rows[0] == "procpipe/stage.py"
    assert len(rows) == len(set(rows)) <= 12
    assert sum(len(text_of(row).splitlines()) for row in rows) <= 3000


def test_each_numbered_step_of_the_drawing_is_in_the_code():
    _, _, page = text_of("docs/architecture.md").partition("## One step")
    drawing = page.partition("## A message")[0]
    drawn = re.findall(r"^ ?(\d+) {3}", drawing, re.MULTILINE)
    sources = (ROOT / "procpipe").rglob("*.py")
    in_code = [n for file in sources for n in re.findall(r"# step (\d+)$", file.read_text(), re.M)]
    assert sorted(map(int, in_code)) == list(map(int, drawn)) == list(range(1, 11))


# -- docs/any_module.md ----------------------------------------------------------------------------


@pytest.mark.dist
def test_the_u_net_of_the_page_is_cut_as_it_is_and_describes_its_layers():
    program, _ = blocks_in("docs/any_module.md")
    alone, together = printed(program), printed(program, 2)

    losses = re.findall("  loss (.*)", alone)
    assert losses == re.findall("  loss (.*)", together)
    assert len(losses) == 10
    assert float(losses[-1]) < float(losses[0])
    assert "sends" in alone
    assert "self.outc(" in alone


WITH_T5 = """
import torch
import procpipe
from procpipe import Stage, state
from procpipe.losses import masked_cross_entropy
from transformers import AutoConfig, AutoModelForSeq2SeqLM

ids, decoder_ids, labels = (torch.arange(40).view(8, 5) * k % 31 for k in (1, 3, 7))
folder, mask = "t5", torch.ones_like(ids)
"""


def test_the_t5_of_the_page_has_the_loss_of_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain: Any = CASES["T5"].make().float()
    plain.save_pretrained("t5")
    names: dict[str, Any] = {}

    exec(WITH_T5 + blocks_in("docs/any_module.md")[1], names)

    expected = plain(**names["batch"], labels=names["labels"]).loss.detach()
    torch.testing.assert_close(names["loss"], expected)
    assert {*load_file("tuned/model.safetensors")} <= {*plain.state_dict()}
