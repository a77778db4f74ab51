from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from forge import machine, plan, presets
from forge.config import Config, RequestError

CUDA = torch.device("cuda")


def resolved(name: str, **train: object) -> Config:
    c = presets.preset(name)
    t = replace(c.train, device="cuda", dtype="bfloat16", compile=True, threads=1, **train)     # type: ignore[arg-type]
    return replace(c, model=replace(c.model, vocab_size=50_257).resolve(), train=t)


def fitted(monkeypatch: pytest.MonkeyPatch, c: Config, gigabytes: float) -> tuple[Config, str]:
    monkeypatch.setattr(machine, "free_bytes", lambda _: gigabytes * 1e9)
    return plan.fit(c, CUDA)


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if name != "8b"])
def test_every_preset_fits_an_h200_and_keeps_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c, said = fitted(monkeypatch, resolved(name), 148)
    assert c.train.recompute == "none"
    assert c.train.batch_tokens // c.model.seq_len % c.train.micro_batch == 0
    assert c.train.micro_batch * c.model.seq_len <= 131_072
    assert sum(plan.memory(c).values()) <= 0.92 * 148e9
    assert "GB planned of 136 GB free" in said


def test_8b_fits_an_h200_with_recomputation_and_80_gb_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitted(monkeypatch, resolved("8b"), 148)[0].train.recompute == "selective"
    with pytest.raises(RequestError, match=r"does not fit into the 74 GB that cuda has free.*moments 31\.2 GB"):
        fitted(monkeypatch, resolved("8b"), 80)


def test_less_memory_means_fewer_windows_then_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [fitted(monkeypatch, resolved("1b"), gigabytes)[0] for gigabytes in (148, 80, 48, 32, 24)]
    assert [(c.train.micro_batch, c.train.recompute) for c in found] == [
        (32, "none"), (16, "none"), (8, "none"), (4, "none"), (2, "selective")]
    assert all(plan.cost(more) < plan.cost(less) for more, less in pairwise(found))


def test_what_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    c, _ = fitted(monkeypatch, resolved("124m", micro_batch=4, recompute="full"), 148)
    assert (c.train.micro_batch, c.train.recompute) == (4, "full")


def test_smaller_settings_end(monkeypatch: pytest.MonkeyPatch) -> None:
    c: Config | None = fitted(monkeypatch, resolved("350m"), 148)[0]
    sizes = []
    while c is not None:
        sizes.append(plan.memory(c)["activations"])
        assert c.train.batch_tokens == 524_288
        c = plan.smaller(c)
    assert len(sizes) > 3
    assert all(after < 0.8 * before for before, after in pairwise(sizes))


def test_what_a_block_keeps() -> None:
    m = resolved("30m").model
    whole, mlp = plan.kept_by_block(m, fused=True)
    assert mlp == 384 + 2 * 1024
    assert plan.kept_by_block(m, fused=False)[1] == mlp + 1024
    assert whole == mlp + 3 * 384 + 384 + 2 * (6 + 4) * 64      # inputs and norms, attention's output, q k v twice


def test_the_plan_is_what_an_h200_took() -> None:
    """3b, as torch counted it when the step was recorded, and the moments that come after (docs/RESULTS.md)."""
    for fp8, micro_batch, took in ((False, 8, 108.7 + 13.8), (True, 4, 61.1 + 13.8)):
        c = resolved("3b", fp8=fp8, micro_batch=micro_batch, recompute="none")
        assert took < sum(plan.memory(c).values()) / 1e9 < 1.15 * took
