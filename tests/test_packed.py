"""Packed attention against the model's own words for it, in Triton's interpreter, which knows no bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forge.config import ModelConfig
from forge.model.transformer import Transformer, init_weights
from forge.ops.attention import FLOORS, distance, packed

MODEL = ModelConfig(vocab_size=17, seq_len=40, dim=32, n_layers=1, n_heads=4, head_dim=16, n_kv_heads=2)
TILES = "triton 16x16w4s1 16x16w4s1 16x16w4s1"
VARIANTS: dict[str, dict] = {
    "modern": {}, "no norm": {"qk_norm": False}, "learned positions": {"position": "learned"},
    "gpt2": {"position": "learned", "qk_norm": False, "n_kv_heads": 4, "bias": True},
    "window": {"window": 9, "full_every": 2, "n_layers": 2}, "head_dim 48": {"head_dim": 48}}


def gradients(model: Transformer, ids: Tensor, starts: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(ids, ids.roll(-1), starts)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(changes: dict, dtype: torch.dtype, device: str = "cpu", documents: bool = True, backend: str = TILES) -> None:
    c = replace(MODEL, **changes).resolve()
    models = [Transformer(c, *how).to(device) for how in (
        (dtype, backend), (dtype, "reference"), (torch.float64, "reference"))]
    for model in models:
        init_weights(model, 0)
        with torch.no_grad():       # every gain takes part
            for p in model.parameters():
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(device))
        model.train()
    models[2].double()
    ids = torch.randint(0, 17, (2, 21), generator=torch.Generator().manual_seed(1)).to(device)
    starts = torch.tensor([[0] * 7 + [7] * 14, [0] * 21], dtype=torch.int32, device=device) if documents else None
    ours, plain, exact = (gradients(model, ids, starts) for model in models)
    for name, true in exact.items():
        assert distance(ours[name], true) <= 2 * distance(plain[name], true) + FLOORS[dtype], name


@pytest.mark.parametrize(("variant", "dtype"), [*((name, torch.float32) for name in VARIANTS), ("modern", torch.float16)])
def test_a_model_trains_as_with_the_reference(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(packed, "CHANNELS", 64)
    monkeypatch.setattr(packed, "PROGRAMS", 2)
    calls, attend = [], packed.attend
    monkeypatch.setattr(packed, "attend", lambda *given: calls.append(1) or attend(*given))
    compare(VARIANTS[variant], dtype)
    assert calls


def test_the_ops_keep_torchs_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    qkv = torch.randn(1, 9, 4 * 16, requires_grad=True)
    gains, tables = torch.ones(2, 16).unbind(0), torch.randn(2, 9, 1, 8).unbind(0)
    for some in ((*gains, *tables), (None,) * 4):
        args = (qkv, *some, None, 2, 1, None, "")
        torch.library.opcheck(packed.packed, args)
        saved = packed.packed(*args)
        torch.library.opcheck(packed.backward, (torch.randn_like(saved[0]), qkv.detach(), *args[1:],
                                                *(x.detach() for x in saved)))
