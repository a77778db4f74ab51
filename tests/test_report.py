"""forge report: a page that stands alone, of whole, young, large and damaged runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from forge.config import Config, Failure, ModelConfig, RequestError
from forge.view.report import BUCKETS, CHARTS, read_metrics, report

MODEL = ModelConfig(vocab_size=65, dim=32, n_heads=2, n_layers=2).resolve()
NASTY = '<script src="http://evil.example/x.js"></script> & "quotes" \ud800 </pre>'


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens": step * 4096, "loss": 4 / step ** 0.2, "lr": 0.003, "grad_norm": 0.5,
            "tokens_per_s": 40_000.0, "step_ms": 100.0, **more}


def make_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asdict(Config(model=MODEL))))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """60 steps with three evaluations, the best in the middle, and two samples."""
    records = [record(step) for step in range(1, 61)]
    for step, val_loss in ((20, 3.5), (40, 2.25), (60, 2.75)):
        records[step - 1] |= {"val_loss": val_loss, "val_bpb": val_loss / 2}
    records[29] |= {"skipped": True, "sample": "To be"}
    records[59]["sample"] = NASTY
    run = make_run(tmp_path / "a & b <i>", records)
    (run / "environment.json").write_text(json.dumps({"torch": "2.13.0", "gpu": None, "argv": ["forge", "train", "<x>"]}))
    (run / "checkpoints" / "step_000040").mkdir(parents=True)
    (run / "best").write_text("step_000040\n")
    return run


class Page(HTMLParser):
    """What a browser would find: every tag with its attributes, and the text of every table cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self.in_cell = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = False


def test_page_tells_the_run(run: Path) -> None:
    path = report(run)
    assert path == run / "report.html"
    html = path.read_text()
    page = Page(html)
    assert page.tags.count("svg") == len(CHARTS)
    for title, *_ in CHARTS:
        assert f"<figcaption>{title}</figcaption><svg" in html
    for words in (f"<b>{MODEL.parameters:,}</b>parameters", "<b>60</b>steps", "<b>245,760</b>tokens",
                  "<b>6.0 s</b>time in steps", "<b>2.2500</b>best validation loss, nats per token",
                  "<b>1.1250</b>its bits per byte", "<b>40</b>at step", ">training<", ">smoothed<", ">validation<"):
        assert words in html
    assert ["40", "163,840", "2.2500", "1.1250", f"{4 / 40 ** 0.2:.4f}", "0.003"] in page.rows
    assert ["best", "step_000040"] in page.rows
    assert ["kept", "step_000040"] in page.rows
    assert ["dim", "32"] in page.rows
    assert ["warmup_steps", "20"] in page.rows
    assert ["torch", "2.13.0"] in page.rows
    assert not list(run.glob(".*"))


def test_text_is_escaped_and_nothing_is_loaded(run: Path) -> None:
    html = report(run).read_text()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "i", "x"} & set(page.tags)
    samples = [unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", html, re.S)]
    assert samples == ["To be", NASTY.replace("\ud800", "\\ud800")]
    for name, value in page.attributes:
        assert name in ("xmlns", "xmlns:xlink") or "//" not in value, (name, value)
        assert name not in ("src", "href", "xlink:href") or value.startswith("#"), (name, value)
    assert not re.search(r"url\((?!#)|@import", html)


def test_charts_take_the_colors_of_the_page_and_share_no_id(run: Path, tmp_path: Path) -> None:
    html = report(run).read_text()
    charts = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
    for color in ("currentColor", "var(--pale)", "var(--strong)", "var(--valid)"):
        assert f"stroke: {color}" in charts
    assert not re.findall(r"#[0-9a-f]{6}\b", charts)
    ids = [value for name, value in Page(html).attributes if name == "id"]
    assert ids
    assert len(ids) == len(set(ids))
    assert report(run, tmp_path / "other.html").read_text() == html     # the same files give the same page


@pytest.mark.parametrize("records", [[], [record(1)], [record(1, val_loss=4.0, val_bpb=2.0)], [record(1), record(2)],
                                     [record(1, lr=0.0), {}, {"step": 3, "loss": float("nan"), "val_loss": "?"}]])
def test_young_runs(tmp_path: Path, records: list[dict[str, Any]], recwarn: pytest.WarningsRecorder) -> None:
    html = report(make_run(tmp_path / "run", records)).read_text()
    evaluated = any(isinstance(r.get("val_bpb"), float) for r in records)
    stepped = bool(records)
    assert Page(html).tags.count("svg") == 5 * stepped + 2 * evaluated
    assert html.count("no evaluation yet") == 2 * (not evaluated)
    assert html.count("no step yet") == 5 * (not stepped)
    assert not list(recwarn)


def test_no_metrics_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    (run / "metrics.jsonl").unlink()
    assert "<b>0</b>steps" in report(run).read_text()


@pytest.mark.parametrize("rest", [b'{"step": 61, "lo', b'{"step": 61, "sample": "\xc3', b"[1"])
def test_last_line_still_being_written(run: Path, rest: bytes) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(rest)
    assert read_metrics(run / "metrics.jsonl").last["step"] == 60


def test_results_of_evaluations(run: Path) -> None:
    blimp = {"accuracy": 0.7125, "stderr": 0.01, "n": 670, "paradigms": {"a": 1.0}}
    (run / "eval-step_000040.json").write_text(json.dumps({
        "texts": {"validation": {"loss": 2.25, "bpb": 1.125, "tokens": 1000, "bytes": 1100}},
        "tasks": {"blimp": blimp, "piqa": {"accuracy": 0.5, "accuracy_norm": 0.6, "n": 10}}}))
    (run / "eval-other.json").write_text(json.dumps({"tasks": 3}))
    rows = Page(report(run).read_text()).rows
    assert ["step_000040", "validation", "2.25", "1.125", "1,000", "1,100"] in rows
    assert ["checkpoint", "task", "accuracy", "stderr", "n", "accuracy norm"] in rows
    assert ["step_000040", "blimp", "0.7125", "0.01", "670", "–"] in rows
    assert ["step_000040", "piqa", "0.5", "–", "10", "0.6"] in rows


def test_large_run_is_small_and_quick(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 200_001):
            more = f', "val_loss": 3.0, "val_bpb": 1.5, "sample": "sample of {step}"' if step % 100 == 0 else ""
            file.write(f'{{"step": {step}, "tokens": {step * 4096}, "loss": {3 + step % 7 / 10}, "lr": {1 / step}, '
                       f'"grad_norm": {step % 11}, "tokens_per_s": {4e4 + step % 13}, "step_ms": 100.0{more}}}\n')
    began = time.process_time()
    path = report(run)
    assert time.process_time() - began < 10     # takes 3 s; a pass that is quadratic takes minutes
    assert path.stat().st_size < 500_000
    html = path.read_text()
    assert "<b>200,000</b>steps" in html
    assert "<b>5.6 h</b>time in steps" in html
    assert "sample of 200000" in html
    assert html.count("<pre>") <= 12
    assert len(Page(html).rows) < 150


def test_thinning_keeps_spikes_order_and_the_best(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 20_001)]
    records[12_344]["loss"] = 77.0
    for step in range(100, 20_001, 100):
        records[step - 1] |= {"val_loss": 3.0, "val_bpb": 1.5}
    records[7_699]["val_loss"] = 1.0
    recorded = read_metrics(make_run(tmp_path / "run", records) / "metrics.jsonl")
    assert max(recorded.curves["loss"], key=lambda point: point[2]) == (12_345 * 4096, pytest.approx(1234.5), 77.0)
    assert recorded.seconds == pytest.approx(2000)
    assert recorded.best["step"] == 7_700
    steps = [r["step"] for r in recorded.evaluations]
    assert 7_700 in steps
    assert steps[-1] == 20_000
    assert len(steps) <= 41
    assert steps == sorted(steps)
    for points in recorded.curves.values():
        assert 0 < len(points) <= 2 * BUCKETS
        assert points == sorted(points, key=lambda point: point[0])


def test_smoothed_is_the_mean_of_what_varies(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [record(step, loss=3.0 + (-1) ** step) for step in range(1, 1001)])
    smoothed = [point[2] for point in read_metrics(run / "metrics.jsonl").curves["smoothed"]]
    assert smoothed[0] == 2.0               # the first loss itself
    assert smoothed[-1] == pytest.approx(3.0, abs=0.05)


def test_wrong_requests(run: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for given, words in ((tmp_path / "none", "no such run folder"), (tmp_path / "folder", "holds no config.json")):
        with pytest.raises(RequestError, match=words):
            report(given)
    for out in (tmp_path / "none" / "x.html", tmp_path / "folder", run / "config.json" / "x.html"):
        with pytest.raises(RequestError, match="cannot be written"):
            report(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a & b <i>", "folder"]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("config.json", b'{"preset": ', "config.json is damaged"),
    ("config.json", b"[]", "config.json is damaged"),
    ("environment.json", b"\xff", "environment.json is damaged"),
    ("eval-best.json", b"", "eval-best.json is damaged"),
    ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', "metrics.jsonl is damaged in line 2"),
    ("metrics.jsonl", b'{"step": 1}\n7\n', "metrics.jsonl is damaged in line 2"),
])
def test_damage_is_named_and_nothing_is_written(run: Path, name: str, content: bytes, words: str) -> None:
    (run / name).write_bytes(content)
    with pytest.raises(Failure, match=words):
        report(run)
    assert not list(run.glob("*report*"))


def test_config_of_another_version(run: Path) -> None:
    config = asdict(Config(model=MODEL))
    config["model"]["a_new_switch"] = 5
    (run / "config.json").write_text(json.dumps(config))
    html = report(run).read_text()
    assert "</b>parameters" not in html
    assert ["a_new_switch", "5"] in Page(html).rows


@pytest.mark.parametrize("steps", [0, 3])
def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    run = make_run(tmp_path / "run", [record(step) for step in range(1, steps + 1)])
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=re.escape("pip install matplotlib")):
        report(run)
    assert not list(run.glob("*report*"))


def test_needs_no_torch_and_leaves_matplotlib_as_it_was(run: Path) -> None:
    code = ("import sys; from forge.view.report import report; assert 'matplotlib' not in sys.modules; report(sys.argv[1]);"
            "import matplotlib as m; assert m.rcParams['text.color'] == 'black' and 'matplotlib.pyplot' not in sys.modules;"
            "sys.exit('torch' in sys.modules)")
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)
