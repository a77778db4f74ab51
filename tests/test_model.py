from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from forge.config import ModelConfig
from forge.generate import context_start, generate, next_logits, pick
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
        cache = Cache(model.config, 2, 16, ids.device, torch.float64)
        parts = [model.logits(model.hidden(piece, cache=cache)) for piece in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("switch", SWITCHES)
@torch.no_grad()
def test_generation_past_seq_len_equals_the_full_forward_over_its_context(switch: str) -> None:
    model = build(SWITCHES[switch])
    ids = [3, 1, 4]
    generator = torch.Generator().manual_seed(0)
    for logits in itertools.islice(next_logits(model, ids), 45):
        context = ids[context_start(len(ids), 16):]
        assert 0 < len(context) <= 16
        full = model.logits(model.hidden(torch.tensor([context]))[0, -1])
        torch.testing.assert_close(logits, full, rtol=0, atol=1e-10)
        ids.append(int(torch.randint(17, (1,), generator=generator)))


def test_the_context_is_whole_and_then_drops_half_a_window_at_a_time() -> None:
    assert [context_start(n, 8) for n in (1, 8, 9, 12, 13, 16, 17)] == [0, 0, 4, 4, 8, 8, 12]
    assert all(0 < n - context_start(n, T) <= T for T in (1, 2, 3, 8) for n in range(1, 40))


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
        model.hidden(torch.zeros(1, 9, dtype=torch.long), cache=Cache(model.config, 1, 8, torch.device("cpu"), model.dtype))


def test_one_seed_gives_one_model() -> None:
    a, b, c = (Transformer(BASE.resolve()) for _ in range(3))
    for model, seed in ((a, 1), (b, 1), (c, 2)):
        init_weights(model, seed)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)
    ids = torch.randint(0, 17, (8, 16))
    assert abs(float(a(ids, ids.roll(1))) - torch.tensor(17.0).log()) < 0.1      # it begins near uniform


def test_picking_a_token() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])

    def picks(**settings: float) -> set[int]:
        arguments = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
        generator = torch.Generator().manual_seed(0)
        return {pick(logits, generator=generator, **arguments) for _ in range(300)}  # type: ignore[arg-type]

    assert picks() == {0, 1, 2, 3}
    assert picks(temperature=0) == {1}
    assert picks(temperature=1e-4) == {1}
    assert picks(top_k=1) == {1}
    assert picks(top_k=2) == {1, 3}
    assert picks(top_k=99) == {0, 1, 2, 3}
    p = torch.softmax(logits, 0)
    assert picks(top_p=float(p[1]) - 0.01) == {1}
    assert picks(top_p=float(p[1]) + 0.01) == {1, 3}
    assert picks(top_p=1e-9) == {1}


def test_probabilities_are_those_of_the_temperature() -> None:
    logits, generator = torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0)
    share = sum(pick(logits, 0.5, 0, 1.0, generator) for _ in range(4000)) / 4000
    assert share == pytest.approx(float(torch.sigmoid(torch.tensor(2.0))), abs=0.02)


def test_generation_is_one_text_a_seed_and_ends_at_end_of_text() -> None:
    model = build({})
    texts = [list(generate(model, [1, 2], 40, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 40
    eot = texts[0][10]
    ended = list(generate(model, [1, 2], 40, seed=1, eot=eot))
    assert ended == texts[0][:texts[0].index(eot)]
    assert list(generate(model, [1] * 50, 3, temperature=0, seed=5)) == list(generate(model, [1] * 50, 3, temperature=0))
    assert list(generate(model, [1], 0)) == []
