from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from forge import bench_attention as module
from forge.bench_attention import Shape, bench_attention, parse
from forge.config import RequestError
from forge.ops.attention import BACKENDS

Call = Callable[..., object]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", {"cuda": 0.0, "elsewhere": 0.0})


def test_pairs_and_flops_by_hand() -> None:
    assert Shape(1, 1, 1, 4, 8).pairs() == 1 + 2 + 3 + 4
    assert Shape(1, 1, 1, 4, 8, 2).pairs() == 1 + 2 + 2 + 2
    assert Shape(1, 1, 1, 4, 8, 9).pairs() == 10
    assert Shape(2, 3, 1, 4, 8).flops() == (4 * 2 * 3 * 8 * 10, 10 * 2 * 3 * 8 * 10)
    assert parse("1,32,8,16384,128,w1024") == Shape(1, 32, 8, 16_384, 128, 1024)
    assert str(parse("8, 12,12,4096,64")) == "8,12,12,4096,64"


def test_every_backend_and_peer_has_figures_or_a_reason() -> None:
    for text in ("1,4,2,40,16", "1,2,2,40,16,w8"):
        rows = bench_attention([text], device="cpu")["measured"]
        names = [row["name"] for row in rows]
        assert {f"forge {name}" for name in BACKENDS} < set(names)
        assert {"sdpa flash", "sdpa math", "sdpa cuDNN", "FlexAttention, compiled", "flash-attn 4"} < set(names)
        for row in rows:
            if row["reason"] is None:
                assert row["forward_fastest_ms"] <= row["forward_ms"] <= row["forward_slowest_ms"]
                assert row["forward_tflops"] > 0
                assert row["memory_mib"] > 0
                assert row["error"] is None or row["error"] < 1e-5
            else:
                assert len(row["reason"]) > 8
                assert "forward_ms" not in row
        best = min(r["forward_ms"] + r["backward_ms"] for r in rows if r["peer"] and r["reason"] is None)
        ours = next(r for r in rows if r["name"] == "forge blocked")
        assert ours["ratio"] == pytest.approx(best / (ours["forward_ms"] + ours["backward_ms"]))


def test_a_wrong_peer_is_not_timed() -> None:
    q = torch.randn(1, 20, 1, 8, requires_grad=True)
    inputs = (q, q, q, torch.randn(1, 20, 1, 8))
    exact = module.forward_backward(module.Candidate("", None, module.backend("blocked", None)), inputs)
    wrong = module.Candidate("wrong", None, lambda q, k, v: q * 1.0)
    assert "wrong: its output differ by" in str(module.check(wrong, inputs, exact, torch.device("cpu")))


def test_windows_are_counted_as_flash_attention_counts_them() -> None:
    seen = {}

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        seen.update(options)
        return q

    q = torch.randn(1, 4, 1, 8)
    module.flash_attn(function, 256)(q, q, q)
    assert seen == {"causal": True, "window_size": (255, 0)}


@pytest.mark.parametrize(("options", "words"), [
    ({"shapes": ["8,12,12,4096"]}, "it is not B,H,K,T,D"), ({"shapes": ["1,1,1,0,64"]}, "each at least 1"),
    ({"shapes": ["1,6,4,64,16"]}, "type: --shapes 1,6,3,64,16"), ({"dtype": "bfloat17"}, "bfloat16"),
    ({"shapes": ["1,1,1,1000000000,64"]}, "GB free; name fewer"), ({"plot": "x.gif"}, "end in .svg or .png"),
    ({"shapes": ["1,1,1,8,8", "1,2,2,8,8"], "plot": "x.svg"}, "differ in more"), ({"device": "tpu"}, "no such device"),
])
def test_what_cannot_be_measured_is_said(options: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        bench_attention(**{"device": "cpu", **options})


def test_the_command_prints_a_table_draws_and_keeps(forge: Call, tmp_path: Path) -> None:
    got = forge("bench", "attention", "--shapes", "1,2,2,32,16", "1,2,2,64,16", "--plot", "a.svg", "--out", "b.json")
    assert got.code == 0, got.err
    assert "forge blocked" in got.out
    assert "ratio" in got.out
    assert {"measured", "environment", "plot"} == set(json.loads((tmp_path / "b.json").read_text()))
    svg = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert svg.tag.endswith("}svg")
    drawn = " ".join(path.get("style", "") for path in svg.iter() if path.tag.endswith("}path"))
    for name in ("forge blocked", "sdpa flash", "sdpa math"):
        assert f"stroke: {module.CURVED[name]}" in drawn
    assert forge("bench", "attention", "--shapes", "1,2").code == 2
