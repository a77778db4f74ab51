from __future__ import annotations

import dataclasses

import pytest
import torch

from forge import machine
from forge.config import ModelConfig
from forge.model.transformer import Cache, Transformer, init_weights

BASE = ModelConfig(vocab_size=17, seq_len=16, dim=16, n_layers=3, n_heads=4)
SWITCHES: dict[str, dict] = {
    "plain": {}, "layer norm": {"norm": "layer"}, "gelu": {"mlp": "gelu"}, "relu2": {"mlp": "relu2"},
    "learned": {"position": "learned"}, "no qk norm": {"qk_norm": False}, "grouped": {"n_kv_heads": 2},
    "one kv head": {"n_kv_heads": 1, "head_dim": 6}, "window": {"window": 5, "full_every": 3},
    "window of one": {"window": 1, "full_every": 2}, "bias": {"bias": True}, "tied": {"tied": True},
    "softcap": {"softcap": 2.0}, "z-loss": {"z_loss": 0.1}, "dropout": {"dropout": 0.5},
    "gpt2": {"norm": "layer", "mlp": "gelu", "position": "learned", "qk_norm": False, "bias": True, "tied": True},
    "all modern": {"n_kv_heads": 2, "window": 4, "full_every": 2, "mlp": "swiglu", "softcap": 10.0},
}


def build(changes: dict, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(dataclasses.replace(BASE, **changes).resolve(), dtype)
    init_weights(model, 0)
    with torch.no_grad():       # every gain and bias takes part
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model.double().eval() if dtype == torch.float64 else model.eval()


@pytest.mark.parametrize("switch", SWITCHES)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(switch: str) -> None:
    """Token by token and in pieces, across the window's edge."""
    model = build(SWITCHES[switch])
    ids = torch.randint(0, 17, (2, 16), generator=torch.Generator().manual_seed(1))
    full = model.logits(model.hidden(ids))
    for sizes in ([1] * 16, [7, 1, 1, 4, 3]):
        caches = [Cache(model.config, 16, ids.device, torch.float64) for _ in ids]
        parts = [model.logits(model.hidden(piece, caches=caches)) for piece in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("switch", ["gpt2", "all modern"])
def test_it_compiles_without_a_graph_break(switch: str, recompute: str) -> None:
    model = Transformer(dataclasses.replace(BASE, **SWITCHES[switch]).resolve(), torch.bfloat16, "blocked", recompute)
    init_weights(model, 0)
    ids, starts = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.int32)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(ids, ids, starts)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
    torch._dynamo.reset()


def test_compiled_parts_equal_the_model() -> None:
    """By the compiler that training uses, which also checks the strides of what the ops give."""
    if machine.compiler() is None:
        pytest.skip("no C++ compiler is here")
    results = []
    for compiled in (False, True):
        model = Transformer(dataclasses.replace(BASE, n_layers=2).resolve(), torch.float32, "blocked").train()
        init_weights(model, 0)
        ids = torch.randint(0, 17, (2, 16), generator=torch.Generator().manual_seed(1))
        if compiled:
            model.compile_parts()
        loss = model(ids, ids.roll(-1))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for x, y in zip(*results):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_recomputing_changes_no_gradient(switch: str, recompute: str) -> None:
    found = []
    for kind in ("none", recompute):
        torch.manual_seed(0)        # dropout's
        model = build(SWITCHES[switch]).train()
        model.set_recompute(kind)
        ids = torch.randint(0, 17, (2, 12), generator=torch.Generator().manual_seed(1))
        model(ids, ids.roll(-1)).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(model.parameters()))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("switch", SWITCHES)
def test_packed_documents_train_as_each_alone(switch: str) -> None:
    model = build(SWITCHES[switch] | {"position": "rope"})      # a learned position counts from the window's start
    ids, targets = torch.randint(0, 17, (2, 1, 14), generator=torch.Generator().manual_seed(2)).unbind(0)
    starts = torch.tensor([[0] * 5 + [5] * 9], dtype=torch.int32)
    packed = model(ids, targets, starts) * 14
    alone = model(ids[:, :5], targets[:, :5]) * 5 + model(ids[:, 5:], targets[:, 5:]) * 9
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-8)    # rope's angles differ by their common turn


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_parameter_learns_and_the_loss_is_that_of_the_logits(switch: str) -> None:
    model = build(SWITCHES[switch])
    ids, targets = torch.randint(0, 17, (2, 2, 12), generator=torch.Generator().manual_seed(3)).unbind(0)
    logits = model.logits(model.hidden(ids))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(ids, targets), expected)
    model.train()
    model(ids, targets).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_z_loss_counts_in_training_alone() -> None:
    model = build({"z_loss": 0.5})
    ids = torch.randint(0, 17, (2, 12))
    plain, lse = model(ids, ids), torch.logsumexp(model.logits(model.hidden(ids)), -1)
    torch.testing.assert_close(model.train()(ids, ids), plain + 0.5 * lse.square().mean())


def test_bfloat16_is_near_float32() -> None:
    ids = torch.randint(0, 17, (4, 16), generator=torch.Generator().manual_seed(4))
    models = [build({}, dtype) for dtype in (torch.float32, torch.bfloat16)]
    a, b = (model(ids, ids.roll(1)) for model in models)
    assert abs(float(a) - float(b)) < 0.02 * float(a)
    assert a.dtype == b.dtype == torch.float32


def test_positions_and_the_cache_have_an_end() -> None:
    model = build({"position": "learned"})
    with pytest.raises(ValueError, match="16 positions"):
        model.hidden(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="cache of 8"):
        model.hidden(torch.zeros(1, 9, dtype=torch.long), caches=[Cache(model.config, 8, torch.device("cpu"), model.dtype)])


def test_one_seed_gives_one_model() -> None:
    a, b, c = (Transformer(BASE.resolve()) for _ in range(3))
    for model, seed in ((a, 1), (b, 1), (c, 2)):
        init_weights(model, seed)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)
    ids = torch.randint(0, 17, (8, 16))
    assert abs(float(a(ids, ids.roll(1))) - torch.tensor(17.0).log()) < 0.1      # it begins near uniform
