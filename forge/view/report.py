"""forge report: one HTML page about a run, made from the files in its folder alone. It needs no network and no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from forge.config import Failure, ModelConfig, RequestError, parse_json

BUCKETS = 500       # of a curve, each with its lowest and its highest point, so that a spike of one step is seen
ROWS = 40           # of the table of evaluations
SAMPLES = 12
CURVES = ("loss", "smoothed", "val_loss", "val_bpb", "lr", "grad_norm", "tokens_per_s")
TOKENS = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
TIME = ((3600.0, " h"), (60.0, " min"), (1.0, " s"))
AXES = {"tokens": (0, TOKENS, "tokens"), "time": (1, TIME, "time in steps")}     # column of a Point, units, label
WIDE, NARROW = (6.0, 3.3), (4.2, 3.0)       # inches; the text's size follows the column that the page gives them
CHARTS = (      # title, curves, x axis, size
    ("Loss against tokens (nats per token)", ("loss", "smoothed", "val_loss"), "tokens", WIDE),
    ("Loss against time (nats per token)", ("loss", "smoothed", "val_loss"), "time", WIDE),
    ("Validation bits per byte against tokens", ("val_bpb",), "tokens", WIDE),
    ("Validation bits per byte against time", ("val_bpb",), "time", WIDE),
    ("Learning rate", ("lr",), "tokens", NARROW),
    ("Gradient norm", ("grad_norm",), "tokens", NARROW),
    ("Tokens per second", ("tokens_per_s",), "tokens", NARROW))
# matplotlib knows no CSS: it draws in colours that occur nowhere else, which then give way to the page's
INK, PALE, STRONG, VALID = "#010101", "#010102", "#010103", "#010104"
CSS_COLORS = {INK: "currentColor", PALE: "var(--pale)", STRONG: "var(--strong)", VALID: "var(--valid)"}
LINES = {"loss": (PALE, 0.9, "training"), "smoothed": (STRONG, 1.6, "smoothed"), "val_loss": (VALID, 1.4, "validation"),
         "val_bpb": (VALID, 1.4, "validation")}
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2024; --soft: #66707a; --line: #d9dee3; --box: #f5f7f9;
  --pale: #a9c3e6; --strong: #1f5fb4; --valid: #d1560f; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181b; --ink: #e3e6e9; --soft: #9aa4ad; --line: #343a40;
  --box: #1d2125; --pale: #3b5a86; --strong: #74aaf2; --valid: #f5924e; } }
@media print { :root { color-scheme: light; --ground: #fff; --ink: #000; --soft: #444; --line: #ccc; --box: #fff;
  --pale: #a9c3e6; --strong: #1f5fb4; --valid: #d1560f; } }
body { max-width: 76rem; margin: 0 auto; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; } h2 { margin: 2rem 0 .6rem; font-size: 1.2rem; }
h3 { margin: 0 0 .3rem; font-size: 1rem; } .soft, figcaption, th { color: var(--soft); font-weight: normal; }
.facts { display: flex; flex-wrap: wrap; gap: .7rem 2.2rem; margin: .8rem 0; }
.facts div { color: var(--soft); font-size: .9rem; } .facts b { display: block; font-size: 1.15rem; color: var(--ink); }
.two, .three { display: grid; gap: 1rem 1.5rem; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.three { grid-template-columns: repeat(3, minmax(0, 1fr)); margin-top: 1rem; }
.tables { columns: 20rem; } .tables div { break-inside: avoid; padding-bottom: 1rem; }
@media screen and (max-width: 50rem) { .two, .three { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; break-inside: avoid; } svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; } .none { padding: 3rem 0; text-align: center; color: var(--soft);
  border: 1px dashed var(--line); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th, td:first-child { white-space: nowrap; }
pre { margin: 0; padding: .7rem; background: var(--box); border: 1px solid var(--line); white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .85rem; }
h2, h3 { break-after: avoid; } @media print { body { padding: 0; font-size: 12px; } }
"""

Point = tuple[float, float, float]      # tokens so far, seconds in steps so far, value


class Recorded(NamedTuple):
    """What metrics.jsonl holds, thinned."""

    curves: dict[str, list[Point]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    last: dict[str, Any]            # record; empty when there is none
    best: dict[str, Any]            # record of the lowest validation loss; empty when there is none
    seconds: float                  # in steps
    skipped: int                    # steps that changed nothing
    returns: int                    # to an earlier checkpoint


def report(run: str | Path, out: str | Path | None = None) -> Path:
    """Writes RUN/report.html (or `out`) from the run folder's files; returns its path.

    The page stands alone: charts are inline SVG, nothing is loaded. The run may still be going. The same files give the
    same page. Time is the sum of the records' step_ms, so without evaluating, saving and pauses.
    Raises RequestError when run is no run folder, out cannot be written or matplotlib is missing, Failure when
    a file of the run is damaged; nothing is written then.
    """
    run = Path(run)
    if not run.is_dir():
        raise RequestError(f"{run}: no such run folder; `forge train` makes one and prints its name")
    if not (run / "config.json").is_file():
        raise RequestError(f"{run} is no run folder, it holds no config.json; type: forge report RUN, with a folder that "
                           "`forge train` made")
    out = Path(out) if out is not None else run / "report.html"
    page = html(run, read_object(run / "config.json"), read_metrics(run / "metrics.jsonl"))
    partial = out.with_name(f".{out.name}.partial")
    try:
        try:
            partial.write_text(page, encoding="utf-8", errors="backslashreplace")      # half a surrogate pair in a sample
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror}; name a file in a folder that is there: "
                           f"forge report {run} --out FILE.html") from error
    return out


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        values = parse_json(path.read_bytes())
    except ValueError as error:
        raise Failure(f"{path} is damaged, it is not JSON: {error}; put a whole one back") from error
    if not isinstance(values, dict):
        raise Failure(f"{path} is damaged: it should hold a JSON object; put a whole one back")
    return values


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl one by one; a last line without its end is still being written, and left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = parse_json(line)
                if not isinstance(record, dict):
                    raise ValueError("a record is a JSON object")
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise Failure(f"{path} is damaged in line {number:,}: {error}; remove that line, or put the whole file "
                              "back") from error
            yield record


def read_metrics(path: Path) -> Recorded:
    """Reads the records twice, to count and to thin, so that memory does not grow with them."""
    curves: dict[str, dict[int, list[Point]]] = {name: {} for name in CURVES}
    evaluations: dict[int, dict[str, Any]] = {}
    samples: dict[int, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    best: dict[str, Any] = {}
    if not path.exists():
        return Recorded({name: [] for name in CURVES}, [], [], last, best, 0.0, 0, 0)
    with path.open("rb") as file:
        count = sum(1 for _ in file) or 1      # the first record may come before it is read again
    tokens = seconds = smoothed = 0.0
    skipped = returns = 0
    for i, record in enumerate(records(path)):
        if "went_back_from" in record:
            returns += 1
            continue
        last = record
        skipped += bool(record.get("skipped"))
        tokens = number(record, "tokens") or tokens
        seconds += (number(record, "step_ms") or 0.0) / 1000
        loss, val_loss = number(record, "loss"), number(record, "val_loss")
        if loss is not None:
            # over a tenth of the steps so far, so that the steep beginning is not dragged behind, and at most a fiftieth
            smoothed += (loss - smoothed) / min(1 + i / 10, 20 + count / 50)
            record["smoothed"] = smoothed
        for name, buckets in curves.items():
            if (value := number(record, name)) is not None:
                bucket = buckets.setdefault(i * BUCKETS // count, [])
                bucket.append((tokens, seconds, value))
                if len(bucket) > 2:
                    bucket.remove(sorted(bucket, key=lambda point: point[2])[1])       # neither lowest nor highest
        if val_loss is not None:
            evaluations[i * ROWS // count] = record
            best = record if not best or val_loss < best["val_loss"] else best
        if isinstance(record.get("sample"), str):
            samples[i * SAMPLES // count] = record
    rows = list(evaluations.values())
    if best and best not in rows:
        rows = sorted([*rows, best], key=lambda record: number(record, "step") or 0)
    return Recorded({name: [point for bucket in buckets.values() for point in bucket] for name, buckets in curves.items()},
                    rows, list(samples.values()), last, best, seconds, skipped, returns)


def number(record: dict[str, Any], name: str) -> float | None:
    """A finite number of a record, or None."""
    value = record.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def unit(top: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which top holds two, else the smallest."""
    return next((u for u in units if top >= 2 * u[0]), units[-1])


def draw(recorded: Recorded, curves: Sequence[str], against: str, size: tuple[float, float]) -> str:
    """One chart as an inline <svg>, or a line that says why there is none."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
    except ImportError as error:
        raise RequestError("forge report draws with matplotlib, which is not installed; type: "
                           "pip install matplotlib") from error
    shown = [name for name in curves if recorded.curves[name]]
    if not shown:
        return f'<p class="none">no {"evaluation" if curves[0].startswith("val") else "step"} yet</p>'
    column, units, label = AXES[against]
    top = max(point[column] for name in shown for point in recorded.curves[name])
    size_of_unit, unit_name = unit(top, units)
    settings = {"svg.fonttype": "none", "svg.hashsalt": f"{curves} {against}", "font.size": 9, "text.color": INK,
                "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with rc_context(settings):     # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        for name in shown:
            points = recorded.curves[name]
            color, width, words = LINES.get(name, (STRONG, 1.2, name))
            few = len(points) <= (60 if name.startswith("val") else 1)
            axes.plot([point[column] / size_of_unit for point in points], [point[2] for point in points], color=color,
                      linewidth=width, label=words, marker="o" if few else "", markersize=3.5)
        values = sorted(point[2] for point in recorded.curves[shown[0]])
        if "grad_norm" in shown and values[0] > 0 and values[-1] > 30 * values[len(values) // 2]:
            axes.set_yscale("log")      # a spike would press all else flat
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif "lr" in shown or "tokens_per_s" in shown:
            axes.set_ylim(0, 1.06 * values[-1] or 1)
        y_size, y_unit = unit(values[-1], TOKENS) if "tokens_per_s" in shown else (1.0, "")
        axes.set_xlim(0, 1.02 * top / size_of_unit or 1)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}{unit_name}" if x else "0"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y / y_size:g}{y_unit}" if y else "0"))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=INK, alpha=0.12, linewidth=0.6)
        if len(curves) > 1:
            axes.legend(frameon=False)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True,
                       metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg"):])      # line2d_1 would be in every chart of the page
    for drawn, css in CSS_COLORS.items():
        svg = svg.replace(drawn, css)
    return svg


def cell(value: object) -> str:
    """A value as the text of a table, escaped."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        value = " ".join(map(str, value)) or None
    return escape(f"{value:.5g}" if isinstance(value, float) else "–" if value is None else str(value))


def fixed(record: dict[str, Any], name: str) -> str | None:
    """A loss of a record, with as many digits as `forge train` prints."""
    return None if (value := number(record, name)) is None else f"{value:.4f}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A <table>; an empty head is left out."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in head)] if head else []
    lines += ["".join(f"<td>{cell(value)}</td>" for value in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"


def results(run: Path) -> str:
    """Tables of what `forge eval` kept in eval-*.json: a column for each figure that is there."""
    kept = {path.stem.removeprefix("eval-"): read_object(path) for path in sorted(run.glob("eval-*.json"))}
    tables = ""
    for key, title, what in (("texts", "Texts scored", "text"), ("tasks", "Tasks", "task")):
        rows = [(checkpoint, name, figures) for checkpoint, found in kept.items() if isinstance(found.get(key), dict)
                for name, figures in found[key].items() if isinstance(figures, dict)]
        columns = list(dict.fromkeys(c for *_, figures in rows for c, v in figures.items() if not isinstance(v, dict)))
        if rows:
            tables += f"<h2>{title}</h2>" + table(["checkpoint", what, *(c.replace("_", " ") for c in columns)], (
                [checkpoint, name, *map(figures.get, columns)] for checkpoint, name, figures in rows))
    return tables


def pointer(run: Path, name: str) -> str | None:
    """What the file `latest` or `best` says."""
    path = run / name
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def html(run: Path, config: dict[str, Any], recorded: Recorded) -> str:
    """The whole page."""
    name, last, best = run.resolve().name, recorded.last, recorded.best
    environment = read_object(run / "environment.json") if (run / "environment.json").is_file() else {}
    evaluated = results(run)
    try:
        parameters = TypeAdapter(ModelConfig).validate_python(config.get("model")).parameters
    except ValidationError:
        parameters = None       # of another version of Forge: the rest of the page still tells
    divisor, word = unit(recorded.seconds, TIME)
    facts = [("preset", config.get("preset")), ("parameters", parameters), ("steps", last.get("step", 0)),
             ("tokens", last.get("tokens", 0)), ("time in steps", f"{recorded.seconds / divisor:.1f}{word}")]
    facts += [(what, n) for what, n in (("steps skipped", recorded.skipped), ("returns to a checkpoint", recorded.returns))
              if n]
    if best:
        facts += [("best validation loss, nats per token", fixed(best, "val_loss")),
                  ("its bits per byte", fixed(best, "val_bpb")), ("at step", best.get("step"))]
    figures = [(size, f"<figure><figcaption>{title}</figcaption>{draw(recorded, curves, against, size)}</figure>")
               for title, curves, against, size in CHARTS]
    sections = {"run": {key: value for key, value in config.items() if not isinstance(value, dict)},
                **{key: value for key, value in config.items() if isinstance(value, dict)}}
    checkpoints = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    return "\n".join([
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)} – Forge</title>',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>',
        f'<h1>{escape(name)}</h1><div class="facts">',
        *(f"<div><b>{cell(value)}</b>{escape(what)}</div>" for what, value in facts if value is not None), "</div>",
        '<div class="two">', *(figure for size, figure in figures if size == WIDE), "</div>",
        '<div class="three">', *(figure for size, figure in figures if size == NARROW), "</div>",
        '<p class="soft">Time is the sum of the steps\' own times, without evaluating, saving and pauses. The smoothed '
        "loss is an exponential mean over the last tenth of the steps so far, or a fiftieth of the run where that is "
        f"less. Of long runs a curve shows the lowest and the highest value of each of {BUCKETS} stretches.</p>",
        "<h2>Evaluations</h2>", table(
            ["step", "tokens", "validation loss", "bits per byte", "training loss of the step", "learning rate"],
            ([record.get("step"), record.get("tokens"), *(fixed(record, n) for n in ("val_loss", "val_bpb", "loss")),
              record.get("lr")] for record in recorded.evaluations)) if best else "<p>none yet</p>",
        evaluated,
        '<h2>Samples</h2><div class="two">',
        *(f"<div><h3>step {cell(record.get('step'))}</h3><pre>{escape(record['sample'])}</pre></div>"
          for record in recorded.samples), "</div>" if recorded.samples else "</div><p>none yet</p>",
        "<h2>Checkpoints</h2>", table([], [("kept", checkpoints or None), ("latest", pointer(run, "latest")),
                                           ("best", pointer(run, "best"))]),
        '<h2>Config</h2><div class="tables">',
        *(f"<div><h3>{escape(key)}</h3>{table([], values.items())}</div>" for key, values in sections.items()), "</div>",
        "<h2>Environment</h2>", table([], environment.items()) if environment else "<p>not recorded</p>",
        "</body></html>\n"])
