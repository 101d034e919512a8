"""The timeline page: one HTML file with picture, table and advice, which loads nothing else.

It has no script: a box shows its title under the pointer, and the switches are checkboxes. Light or
dark follows the reader's system. Everything that comes from the recording is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from statistics import fmean
from typing import Any

from procpipe.launch.timeline.drawing import draw, later_partitions, step_bars
from procpipe.run.statistics import Split
from procpipe.timeline.advice import basis
from procpipe.timeline.palette import ALL_REDUCE, LOOKS
from procpipe.timeline.recording import Recording, Step
from procpipe.words import counted, seconds_text

#: The parts of a stage's time: the field of Split, its name, and what it is.
_PARTS = (
    ("busy_s", "busy", "in tasks, as measured"),
    ("bubble_s", "bubble", "idle because of the plan: also with equal stages and no transfers"),
    ("imbalance_s", "imbalance", "idle because stages or micro-batches take unequally long"),
    ("communication_s", "communication and overhead", "waits for messages; hosts between tasks"),
)
_OF_REPLICAS = (
    ("all_reduce_s", "all-reduce", "waits for all-reduces, after the step's last task"),
)

Parts = Sequence[tuple[str, str, str]]


def page(
    name: str, recording: Recording, step: Step, splits: Sequence[Split], advice: Sequence[str]
) -> str:
    """Return the page of one step of a recording, whose file has this name, with advice."""
    drawing = draw(recording, step)
    kinds = _PARTS + _OF_REPLICAS if step.num_replicas > 1 else _PARTS
    title = escape(f"{name}: step {step.number}")
    parts = [
        "<!DOCTYPE html>",
        "<html lang='en'>",
        "<head>",
        "<meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        "<link rel='icon' href='data:,'>",
        f"<title>{title}</title>",
        f"<style>{_STYLE}{_task_style()}</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{title}</h1>",
        f"<p class='lead'>{_lead(step, splits, kinds)}</p>",
        f"<p class='facts'>{escape(_facts_text(recording, step))}</p>",
        *_warnings(recording),
        "<input type='checkbox' id='messages'>",
        f"<input type='checkbox' id='fit'{' checked' if drawing.fits else ''}>",
        f"<div class='legend'>{''.join(_legend(step))}</div>",
        f"<div class='picture'>{drawing.names}<div class='scroll'>{drawing.lanes}</div></div>",
        "<p class='note'>The plan is the stages' tasks in the order in which they ran, with the "
        "median seconds of each kind on each stage and messages that take no time. Point at a box "
        "for its numbers.</p>",
        "<h2>Where the time went</h2>",
        _table(recording, splits, kinds),
        *_explained(kinds),
        "<h2>What would help</h2>",
        _advice(recording, step, advice),
        "<h2>All steps</h2>",
        f"<div class='scroll'>{step_bars(recording, step)}</div>",
        f"<p class='note'>{escape(_steps_text(recording))}</p>",
        "<h2>How it was measured</h2>",
        f"<p class='note'>{escape(_clock_text(recording))}</p>",
        "</main>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


def _lead(step: Step, splits: Sequence[Split], kinds: Parts) -> str:
    shares = [
        f"<span class='key {name.split()[0]}'></span>"
        f"{_percent(_mean(splits, field), step.seconds)} {name}"
        for field, name, _ in kinds
    ]
    return f"<b>{seconds_text(step.seconds)}</b> a step; on average {', '.join(shares)}."


def _facts_text(recording: Recording, step: Step) -> str:
    facts = recording.facts
    sizes = sorted({size for of_replica in step.shares for size in of_replica})
    stages = counted(step.num_stages, "stage")
    if step.num_replicas > 1:
        stages = f"{step.num_replicas} replicas of {stages}"
    samples = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}" if sizes else "?"
    parts = [
        stages,
        f"balance {facts.get('balance')}",
        f"{_micro_batches_text(step)} of {samples} sample{'' if samples == '1' else 's'}",
        f"checkpoint {facts.get('checkpoint')}",
        f"schedule {recording.facts.get('schedule')}",
        f"on {facts.get('the type of devices')}",
        f"procpipe {facts.get('procpipe')}",
        f"torch {facts.get('torch')}",
        f"written {str(facts.get('written'))[:16].replace('T', ' ')} UTC",
    ]
    return " · ".join(parts)


def _micro_batches_text(step: Step) -> str:
    numbers = {len(of_replica) for of_replica in step.shares}
    if len(numbers) == 1:
        each = " each" if step.num_replicas > 1 else ""
        return counted(len(step.shares[0]), "micro-batch") + each
    return f"{min(numbers)} to {max(numbers)} micro-batches each"


def _warnings(recording: Recording) -> Iterator[str]:
    if not recording.is_closed:
        last = recording.steps[-1].number
        yield (
            "<p class='warning'>The run did not close its stages: it failed, or was ended, after "
            f"step {last}. Later tasks are not in the file.</p>"
        )


def _legend(step: Step) -> Iterator[str]:
    kinds = {ran.task.kind for ran in step.tasks}
    for kind, look in LOOKS.items():
        if kind in kinds:
            yield f"<span><i class='swatch {kind}'></i>{look.name}</span>"
    if later_partitions(step):
        yield "<span><i class='swatch F later'></i>paler: not the stage's first partition</span>"
    sums = " or an all-reduce" if step.sums else ""
    yield f"<span><i class='swatch wait'></i>waiting for a message{sums}</span>"
    if step.sums:
        yield f"<span><i class='swatch all-reduce'></i>{ALL_REDUCE.name}</span>"
    yield "<span><i class='swatch lane'></i>idle</span>"
    yield "<span class='switches'><label for='fit'>fit to the page</label>"
    yield "<label for='messages'>messages</label></span>"


def _table(recording: Recording, splits: Sequence[Split], kinds: Parts) -> str:
    balance: Sequence[Any] = recording.facts.get("balance", ())
    num_replicas = 1 + max(one.replica for one in splits)
    has_layers = len(balance) * num_replicas == len(splits)
    heads = ["stage", *["layers"] * has_layers, *(name for _, name, _ in kinds), "step", ""]

    def row(name: str, layers: str, one: Split) -> str:
        cells = [layers] * has_layers
        for part_s in (getattr(one, field) for field, _, _ in kinds):
            cells.append(f"{_ms(part_s)} <small>{_percent(part_s, one.step_s)}</small>")
        cells.append(_ms(one.step_s))
        columns = "".join(f"<td>{cell}</td>" for cell in cells)
        return f"<tr><th>{name}</th>{columns}<td class='bar'>{_bar(one, kinds)}</td></tr>"

    def block(replica: int) -> Iterator[str]:
        if num_replicas > 1:
            yield f"<tr><th colspan='{len(heads)}'>replica {replica}</th></tr>"
        for one in splits:
            if one.replica == replica:
                yield row(str(one.stage), str(layers[one.stage]), one)

    means: Any = {field: _mean(splits, field) for field, _, _ in kinds}
    mean = replace(splits[0], **means)
    layers = balance if has_layers else [""] * len(splits)
    mean_layers = f"{fmean(balance):.3g}" if has_layers else ""
    return "\n".join(
        [
            "<div class='scroll'><table>",
            f"<thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>",
            "<tbody>",
            *(line for replica in range(num_replicas) for line in block(replica)),
            "</tbody>",
            f"<tfoot>{row('mean', mean_layers, mean)}</tfoot>",
            "</table></div>",
        ]
    )


def _bar(one: Split, kinds: Parts) -> str:
    pieces = []
    for field, name, _ in kinds:
        share = getattr(one, field) / one.step_s if one.step_s else 0.0
        pieces.append(
            f"<span class='{name.split()[0]}' style='width:{share:.2%}' title='{name} {share:.1%}'>"
            "</span>"
        )
    return f"<div class='stack'>{''.join(pieces)}</div>"


def _explained(kinds: Parts) -> Iterator[str]:
    yield "<dl class='note'>"
    for _, name, what in kinds:
        yield f"<dt><span class='key {name.split()[0]}'></span>{name}</dt><dd>{what}</dd>"
    yield "</dl>"


def _advice(recording: Recording, step: Step, advice: Sequence[str]) -> str:
    source = basis(recording, step)
    if not advice:
        return f"<p>Nothing, by the numbers of {source}.</p>"
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in advice)
    return f"<ul>{items}</ul><p class='note'>Worked out from {source}.</p>"


def _steps_text(recording: Recording) -> str:
    kept = recording.kept_text()
    text = f"The file has {kept} of {recording.num_steps}; --step N shows another."
    if len(recording.steps) < recording.num_steps:
        text += " Of a long run the first steps and the last are kept."
    return text


def _clock_text(recording: Recording) -> str:
    error = seconds_text(recording.clock_error_s)
    drifts = [abs(clock.drift_ppm) for clock in recording.clocks if clock.drift_ppm is not None]
    is_cuda = recording.facts.get("the type of devices") == "cuda"
    text = f"Times of different stages are comparable to {error}: the ranks' clocks were compared "
    if len(recording.clocks) == 1:
        text = "There is one clock."
    elif len(drifts) == len(recording.clocks):
        text += "at both ends of the run"
        drift_ppm = max(drifts)
        text += f", and their drift (at most {drift_ppm:.2g} ppm) taken out." if drift_ppm else "."
    else:
        text += "at its beginning only, so that a drift since then is not taken out."
    return f"{text} {'Tasks by the device, waits by the host.' if is_cuda else 'All by the hosts.'}"


def _mean(splits: Sequence[Split], field: str) -> float:
    return fmean(getattr(one, field) for one in splits)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _percent(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s if whole_s else 0.0:.1%}"


def _task_style() -> str:
    return (
        "".join(
            f".{kind} rect,.swatch.{kind}{{fill:{look.fill};background:{look.fill}}}"
            f".{kind} text{{fill:{look.ink}}}"
            for kind, look in LOOKS.items()
        )
        + f".all-reduce{{fill:{ALL_REDUCE.fill};background:{ALL_REDUCE.fill}}}"
    )


_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2126;--faint:#5d6670;--line:#d9dde1;
--lane:#eef0f2;--wait:#8a939c;--shade:#f6f7f8;
--busy:#3f5468;--bubble:#b4bbc2;--imbalance:#f0e442;--communication:#cc79a7}
@media (prefers-color-scheme:dark){:root{--paper:#15181b;--ink:#e4e7ea;--faint:#9aa4ad;
--line:#343a40;--lane:#23282c;--wait:#78828b;--shade:#1c2023;
--busy:#8fa9c0;--bubble:#5b646c;--imbalance:#f0e442;--communication:#cc79a7}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1340px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:17px;margin:34px 0 10px}
.lead{font-size:17px;margin:0 0 4px}.facts,.note{color:var(--faint);font-size:13px}
.facts{margin:0 0 18px}.note{margin:8px 0}
.warning{border-left:4px solid #d55e00;background:var(--shade);padding:8px 12px}
.picture{display:flex;border:1px solid var(--line);border-radius:6px;padding:8px 0 2px 10px}
.scroll{overflow-x:auto;min-width:0}.picture svg{display:block;flex:none}
svg text{font-size:12px;fill:var(--ink);font-family:inherit}
svg .head{font-weight:600;font-size:13px}svg .faint{fill:var(--faint);font-size:11px}
.task text{text-anchor:middle;font-size:11px;pointer-events:none}
.task rect{stroke:var(--paper);stroke-width:.6}.task:hover rect{stroke:var(--ink);stroke-width:2}
.lane{fill:var(--lane);background:var(--lane)}.wait{fill:var(--wait);background:var(--wait)}
.later rect,.swatch.later{opacity:.7}.grid{stroke:var(--line);stroke-width:1}
.end{stroke:var(--faint);stroke-width:1.5;stroke-dasharray:4 3}
.hops{display:none}.hops line{stroke:var(--ink);stroke-width:1.2;opacity:.55}
.hops line:hover{opacity:1;stroke-width:3}
#messages,#fit{position:absolute;opacity:0}#messages:checked~.picture .hops{display:inline}
.lanes{min-width:100%}.fitted,#fit:checked~.picture .scrolled{display:none}
#fit:checked~.picture .lanes{width:100%}#fit:checked~.picture .fitted{display:inline}
.picture .scroll{flex:1;margin-right:10px}
@media (max-width:1000px){#fit:checked~.picture .number{display:none}}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 8px;font-size:13px;align-items:center}
.swatch{display:inline-block;width:13px;height:13px;border-radius:2px;margin-right:6px;
vertical-align:-2px}.swatch.lane{outline:1px solid var(--line)}
.swatch.wait,.swatch.all-reduce{height:6px;vertical-align:2px}
.switches{margin-left:auto;display:flex;gap:8px}
.legend label{border:1px solid var(--line);border-radius:6px;padding:2px 10px;cursor:pointer}
#messages:checked~.legend [for=messages],#fit:checked~.legend [for=fit]{
background:var(--ink);color:var(--paper)}
#messages:focus-visible~.legend [for=messages],#fit:focus-visible~.legend [for=fit]{
outline:2px solid #0072b2;outline-offset:2px}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:6px 12px 6px 0;text-align:right;border-bottom:1px solid var(--line);
white-space:nowrap}thead th{color:var(--faint);font-weight:500;white-space:normal}
tbody th,tfoot th{font-weight:600}
th:first-child{text-align:left}small{color:var(--faint);font-size:12px;margin-left:3px}
tfoot td,tfoot th{border-bottom:0;color:var(--faint)}
td.bar{width:22%;min-width:130px;padding-right:0}
.stack{display:flex;height:14px;border-radius:3px;overflow:hidden}
.busy{background:var(--busy)}.bubble{background:var(--bubble)}
.imbalance{background:var(--imbalance)}.communication{background:var(--communication)}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px}dd{margin:0}
@media (max-width:600px){dl{grid-template-columns:1fr}dd{margin:0 0 6px 15px}}
li{margin:6px 0}ul{padding-left:20px;max-width:90ch}
.bars{display:block}.bar{fill:var(--bubble)}.bar.shown{fill:#0072b2}
"""
