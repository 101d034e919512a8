"""``procpipe timeline``: the page and the summary, without a browser and in a real one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from procpipe.launch.main import main
from procpipe.launch.timeline.page import page
from procpipe.plan.task import Task
from procpipe.timeline.chrome import to_chrome
from procpipe.timeline.idle import split
from procpipe.timeline.recording import Clock, Hop, Ran
from tests.timeline.recordings import EQUAL, UNEQUAL, read_step, recording_of, replicas_recording

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

HOP = Hop("activation", 0, 0, 1, 4096, 1.0, 1.1, 0.0, 1.5)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A file with steps 0, 1 and 5; the version of torch is HTML, which the page must escape."""
    monkeypatch.chdir(tmp_path)
    recording = recording_of(
        read_step(UNEQUAL, number=0),
        read_step(EQUAL, number=1, plan="another", hops=[HOP]),
        read_step(UNEQUAL, number=5),
        facts={"torch": "<script>alert(1)</script>"},
    )
    Path("run.json").write_text(json.dumps(to_chrome(recording)))
    return recording


class Page(HTMLParser):
    """The contents of a page: the cells of its table, its items, the titles of its drawings."""

    def __init__(self, html):
        super().__init__()
        self.rows: list[list[str]] = []
        self.items: list[str] = []
        self.titles: list[str] = []
        self.tags: list[str] = []
        self._into: list[str] | None = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td", "li", "title"):
            lists = {"li": self.items, "title": self.titles}
            self._into = lists[tag] if tag in lists else self.rows[-1]
            self._into.append("")

    def handle_endtag(self, tag):
        if tag in ("th", "td", "li", "title"):
            self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data


def rows_of(recording, number):
    """Return the expected rows of stages."""
    step = recording.step(number)
    rows = []
    for shares, layers in zip(split(step), recording.facts["balance"], strict=True):
        parts = shares.busy_s, shares.bubble_s, shares.imbalance_s, shares.communication_s
        cells = [f"{part * 1e3:.2f} ms {part / shares.step_s:.1%}" for part in parts]
        rows.append([str(shares.stage), str(layers), *cells, f"{shares.step_s * 1e3:.2f} ms", ""])
    return rows


def test_the_last_step_is_shown_beside_the_file(run, capsys):
    assert main(["timeline", "run.json"]) == 0

    page = Page(Path("run.html").read_text())
    assert page.titles[0] == "run.json: step 5"
    assert page.rows[1:3] == rows_of(run, 5)
    assert page.rows[1][2:6] == [
        "6000.00 ms 40.0%", "4500.00 ms 30.0%", "4500.00 ms 30.0%", "0.00 ms 0.0%",
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert printed.startswith("step 5 of run.json (steps 0 to 1 and 5 of 8):\n\nstage ")
    assert "\n- Stage 1 is 33% slower than the mean (usually 12 s busy" in printed
    assert page.items[0] in printed
    assert printed.endswith("\n\nWorked out from this step alone.\n\nrun.html\n")


def test_each_task_has_a_box_above_and_below_with_its_numbers(run):
    assert main(["timeline", "run.json", "--step", "1", "-o", "one.html"]) == 0

    page = Page(Path("one.html").read_text())
    assert page.rows[1:3] == rows_of(run, 1)
    boxes = [title for title in page.titles if re.match(r"[FB]\d@", title)]
    assert len(boxes) == 2 * 8
    assert boxes[:8].count("F1@1: forward, micro-batch 1, partition 1\n1 s, from 2 s to 3 s") == 1
    assert boxes[8:].count(
        "F1@1: forward, micro-batch 1, partition 1\n1 s, from 2.5 s to 3.5 s"
    ) == 1  # fmt: skip
    assert "stage 1 waited 1.5 s for activation 0 from stage 0 (4,096 bytes)" in page.titles
    assert (
        "activation 0 from stage 0 to stage 1: 4,096 bytes, 500 ms from posted to taken"
        in page.titles
    )


def test_the_page_loads_nothing_and_runs_nothing(run):
    main(["timeline", "run.json"])
    html = Path("run.html").read_text()

    assert "script" not in Page(html).tags
    assert "&lt;script&gt;alert(1)" in html
    assert not re.search(r"(src|href)='(?!data:,')", html)
    assert "http" not in html


def test_the_page_names_the_last_step_of_a_failed_run(run):
    data = json.loads(Path("run.json").read_text())
    data["otherData"]["is_closed"] = False
    Path("run.json").write_text(json.dumps(data))
    main(["timeline", "run.json"])

    assert "did not close its stages: it failed, or was ended, after step 5" in Path(
        "run.html"
    ).read_text()  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (None, [], "run.json: No such file or directory"),
        ("", [], "run.json: it is empty"),
        ("\n", [], "run.json: it is empty"),
        ("[1, 2", [], "run.json: it is not JSON"),
        ("\xff", [], "run.json: it is not JSON"),
        ('{"traceEvents": []}', [], "it is not a timeline that Stage(trace=…) wrote"),
        ("ours", ["--step", "3"], "step 3 is not in it: it has steps 0 to 1 and 5 of 8"),
        ("ours", ["-o", "run.json"], "the page would take its place"),
        ("ours", ["-o", "nowhere/x.html"], "nowhere/x.html: No such file or directory"),
    ],
)
def test_each_mistake_is_one_line(run, content, words, expected, capsys):
    if content is None:
        Path("run.json").unlink()
    elif content != "ours":
        Path("run.json").write_bytes(content.encode("latin-1"))

    assert main(["timeline", "run.json", *words]) == 1
    assert capsys.readouterr().err.startswith("procpipe timeline: ")
    main(["timeline", "run.json", *words])
    assert expected in capsys.readouterr().err
    assert not Path("run.html").exists()


def test_a_run_that_failed_in_its_first_step_has_nothing_to_show(run, capsys):
    Path("run.json").write_text(json.dumps(to_chrome(recording_of(num_steps=0))))

    assert main(["timeline", "run.json"]) == 1
    assert "run.json: no step ended on all stages" in capsys.readouterr().err


def test_a_folder_is_neither_a_file_nor_a_page(run, capsys):
    for words in (["."], ["/"], [".", "-o", "x.html"]):
        assert main(["timeline", *words]) == 1
        assert "Is a directory" in capsys.readouterr().err


def html_of(recording):
    step = recording.step()
    return page("run.json", recording, step, split(step), [])


def stretched(step, factor):
    """Return the step with the tasks of each stage repeated ``factor`` times."""
    length_s = step.seconds
    tasks = [
        Ran(ran.rank, Task(ran.task.kind, ran.task.i + 2 * k, ran.task.j),
            ran.start_s + k * length_s, ran.end_s + k * length_s)
        for k in range(factor) for ran in step.tasks
    ]  # fmt: skip
    ends_s = tuple(factor * length_s for _ in step.ends_s)
    return replace(step, tasks=tuple(tasks), ends_s=ends_s, shares=(step.shares[0] * factor,))


@pytest.mark.parametrize(("factor", "fits"), [(1, True), (40, False)])
def test_a_picture_whose_boxes_would_be_too_narrow_is_not_fitted_to_the_page(factor, fits):
    html = html_of(recording_of(stretched(read_step(EQUAL), factor)))

    assert ("id='fit' checked" in html) == fits
    lanes = html[html.index("<svg class='lanes'") :]
    axes = re.findall(r"<g class='axis([ a-z]*)'>(.*?)</g>", lanes, re.S)
    assert [shown for shown, _ in axes] == ([""] if fits else [" scrolled", " fitted"])
    for _, axis in axes:
        labels = re.findall(r"x='([\d.]+)%' y='\d+' text-anchor='(\w+)'>([^<]+)<", axis)
        assert len(labels) >= 5
        assert labels[0] == ("0.0000", "start", "0")
        seconds = [float(at) / 100 * 10 * factor for at, _, _ in labels]
        assert [text for _, _, text in labels[1:]] == [f"{s:.3g} s" for s in seconds[1:]]
    assert labels[-1][:2] == ("100.0000", "end")  # otherwise half of the label would be cut off


def test_the_page_names_the_schedule_and_when_it_was_written():
    step = read_step(EQUAL)
    facts = {"schedule": "zb-h1", "written": "2030-01-02T03:04:05+00:00"}
    html = html_of(recording_of(step, facts=facts))

    assert "2 micro-batches of 8 samples" in html
    assert "schedule zb-h1 ·" in html
    assert "written 2030-01-02 03:04 UTC<" in html


def test_counts_of_one_are_in_the_singular():
    step = read_step("F0 0-1 B0 1-3", shares=((1,),))
    recording = recording_of(step, facts={"balance": [5]}, clocks=(Clock(0, 0.0, 0.0, 0.0),))

    assert "1 stage · balance [5] · 1 micro-batch of 1 sample ·" in html_of(recording)


@pytest.mark.parametrize(
    ("drift_ppm", "expected"),
    [
        (0.0, "were compared at both ends of the run. All by the hosts."),
        (2.5, "at both ends of the run, and their drift (at most 2.5 ppm) taken out."),
        (None, "at its beginning only, so that a drift since then is not taken out."),
    ],
)
def test_the_page_names_how_clocks_were_compared(drift_ppm, expected):
    clocks = (Clock(0, 0.0, 0.0, 0.0), Clock(1, 0.5, 2e-6, drift_ppm))
    assert expected in html_of(recording_of(read_step(EQUAL), clocks=clocks))


# -- in a browser -------------------------------------------------------------------------------


def test_replicas_are_blocks_with_their_sums(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recording = replicas_recording()
    Path("run.json").write_text(json.dumps(to_chrome(recording)))
    assert main(["timeline", "run.json"]) == 0

    html = Path("run.html").read_text()
    page = Page(html)
    assert [row[0] for row in page.rows[1:-1]] == ["replica 0", "0", "1", "replica 1", "0", "1"]
    assert page.rows[2][-3] == "1500.00 ms 12.0%"
    assert "12.0% all-reduce" in html
    assert "2 replicas of 2 stages" in html
    assert "2 micro-batches each of 7 to 8 samples" in html
    assert (
        "all-reduce of gradients 0 on stage 0 of replica 1: 4,000 bytes, 1.25 s from begun to "
        "over, of which the stage waited 1.25 s"
    ) in page.titles
    waited = "stage 1 of replica 1 waited 500 ms for the all-reduce of gradients 0 (1,000 bytes)"
    assert waited in page.titles
    assert html.count(">replica 0</text>") == html.count(">replica 1</text>") == 2
    bars = re.findall(r"<rect class='all-reduce' x='([\d.]+)%' y='(\d+)' width='([\d.]+)%'", html)
    assert [(float(x), float(width)) for x, _, width in bars] == [
        pytest.approx((100 * one.start_s / 12.5, 100 * (one.end_s - one.start_s) / 12.5), abs=1e-3)
        for one in recording.step().sums
    ]
    tops = [int(y) for _, y, _ in bars]
    assert tops == sorted(set(tops))  # a strip of its own on each rank
    assert "replica 1\n" in capsys.readouterr().out


def chromium(folder, *options):
    assert CHROMIUM is not None
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr",
         f"--user-data-dir={folder}", "--window-size=1200,1000", *options],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_browser_shows_the_numbers_without_warnings(run, tmp_path):
    main(["timeline", "run.json", "--step", "1"])
    done = chromium(tmp_path / "profile", "--dump-dom", (tmp_path / "run.html").as_uri())

    assert "CONSOLE" not in done.stderr
    page = Page(done.stdout)
    assert page.rows[1:3] == rows_of(run, 1)
    assert page.tags.count("rect") >= 2 * (8 + 2)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize(("scheme", "paper"), [(0, (21, 24, 27)), (1, (255, 255, 255))])
def test_a_browser_draws_the_boxes_in_light_and_dark(run, tmp_path, scheme, paper):
    image = pytest.importorskip("PIL.Image")
    main(["timeline", "run.json", "--step", "1"])
    png = tmp_path / "page.png"
    chromium(
        tmp_path / "profile",
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--screenshot={png}",
        (tmp_path / "run.html").as_uri(),
    )
    with image.open(png) as opened:
        colours = {
            colour: count for count, colour in opened.convert("RGB").getcolors(maxcolors=1 << 20)
        }
    assert max(colours, key=colours.__getitem__) == paper
    forward, backward = colours[0x00, 0x72, 0xB2], colours[0xE6, 0x9F, 0x00]
    assert backward == pytest.approx(2 * forward, rel=0.1)  # B takes twice as long as F
