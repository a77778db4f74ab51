from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from test_model import SWITCHES, build

from forge import tokenizer as tokenizers
from forge.config import Failure, ModelConfig, RequestError
from forge.generate import Completion, Row, Sampling, complete, context_start, next_logits, pick, until_stop, write
from forge.model.transformer import Transformer, init_weights

BYTES = tokenizers.byte_tokens()
SMALL = ModelConfig(vocab_size=257, seq_len=32, dim=32, n_layers=2, n_heads=2)


def random_model(dtype: torch.dtype = torch.float32, **changes: object) -> Transformer:
    """Its texts are wild, so that one wrong bit would soon show."""
    model = Transformer(dataclasses.replace(SMALL, **changes).resolve(), dtype)  # type: ignore[arg-type]
    init_weights(model, 0)
    with torch.no_grad():
        std = (0.3 if model.head is None else 2.5) / model.config.dim ** 0.5
        model.head_weight.normal_(0, std, generator=torch.Generator().manual_seed(3))
    return model.eval()


@pytest.mark.parametrize("switch", SWITCHES)
def test_logits_past_seq_len_equal_the_full_forward_over_the_context(switch: str) -> None:
    """Three rows of different length, each over the edge of its context at another time."""
    model = build(SWITCHES[switch])
    rows = [Row([3, 1, 4]), Row([5] * 13), Row([2] * 30)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        for row, logits in zip(rows, next_logits(model, rows)):
            context = row.ids[context_start(len(row.ids), 16):]
            assert 0 < len(context) <= 16
            full = model.logits(model.hidden(torch.tensor([context]))[0, -1])
            torch.testing.assert_close(logits, full.detach(), rtol=0, atol=1e-10)
            row.ids.append(int(torch.randint(17, (1,), generator=generator)))


def test_the_context_moves_half_a_window_at_a_time() -> None:
    assert [context_start(n, 8) for n in (1, 8, 9, 12, 13, 16, 17)] == [0, 0, 4, 4, 8, 8, 12]
    assert all(0 < n - context_start(n, T) <= T for T in (1, 2, 3, 8) for n in range(1, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"dim": 192, "ffn_dim": 768, "n_heads": 3, "mlp": "gelu", "norm": "layer",
                                          "position": "learned", "bias": True, "tied": True},
                                     {"n_kv_heads": 1, "window": 8}])
def test_one_seed_gives_one_text_whatever_the_batch(dtype: torch.dtype, changes: dict) -> None:
    """Equal to the bit, log-probabilities too, over the edge of the context, with more sequences than go in one step."""
    model = random_model(dtype, **changes)
    prompts = ["", "a", "the iron", "the iron", "x" * 31, "x" * 50, "é", "ab"]
    settings = {"max_new_tokens": 24, "sampling": Sampling(temperature=1.0), "seed": 5, "logprobs": True}
    together = complete(model, BYTES, prompts, n=3, **settings)
    assert len(together) == 24
    for i, prompt in enumerate(prompts):
        for j in range(3):
            alone = complete(model, BYTES, [prompt], **settings | {"seed": 5 + j})[0]
            assert (alone.ids, alone.logprobs) == (together[3 * i + j].ids, together[3 * i + j].logprobs)
    assert len({c.text for c in together[:3]}) == 3             # n samples differ, from the first token on
    assert len({c.ids[0] for c in complete(model, BYTES, ["a"], n=20, **settings)}) > 5


def test_logprobs_are_those_of_the_full_forward() -> None:
    model = random_model(torch.float64).double()
    c = complete(model, BYTES, ["ab"], max_new_tokens=20, logprobs=True,
                 sampling=Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3, logit_bias={65: 2.0}))[0]
    ids = [BYTES.eot, 97, 98, *c.ids]
    log_p = torch.log_softmax(model.logits(model.hidden(torch.tensor([ids[:-1]]))), -1)[0].detach()
    assert c.logprobs == pytest.approx([float(log_p[2 + i, token]) for i, token in enumerate(c.ids)], abs=1e-9)


def test_stop_strings_across_tokens_are_not_said() -> None:
    model = random_model()
    letters = Sampling(temperature=1.0, logit_bias={i: -math.inf for i in range(257) if not 97 <= i < 123})
    free = complete(model, BYTES, ["q"], max_new_tokens=30, sampling=letters)[0]
    assert (free.finish, len(free.text)) == ("length", 30)
    stop = free.text[9:12]
    c = Completion("q")
    pieces = [new for _, new in write(model, BYTES, [c], max_new_tokens=30, sampling=letters, stop=["never", stop])]
    assert "".join(pieces) == c.text == free.text[:free.text.index(stop)]
    assert c.finish == "stop"


@pytest.mark.parametrize(("text", "stop", "expected"), [
    ("hello", [], ("hello", "", False)), ("hello", ["lo"], ("hel", "", True)), ("hel", ["lo"], ("he", "l", False)),
    ("aab", ["abc"], ("a", "ab", False)), ("abcab", ["x", "bc", "ab"], ("", "", True)), ("", ["a"], ("", "", False))])
def test_what_may_begin_a_stop_string_is_held_back(text: str, stop: list[str], expected: tuple) -> None:
    assert until_stop(text, stop, last=False) == expected
    if not expected[2]:
        assert until_stop(text, stop, last=True) == (text, "", False)


def test_generation_ends_at_end_of_text_and_at_the_number_of_tokens() -> None:
    model = random_model()
    ends = complete(model, BYTES, ["a"], sampling=Sampling(logit_bias={BYTES.eot: 1000.0}))[0]
    assert (ends.finish, ends.text, ends.ids) == ("end", "", [])
    never = complete(model, BYTES, ["a"], max_new_tokens=7, sampling=Sampling(logit_bias={BYTES.eot: -math.inf}))[0]
    assert (never.finish, len(never.ids)) == ("length", 7)
    assert complete(model, BYTES, ["a"], max_new_tokens=0)[0].ids == []
    assert complete(model, BYTES, []) == []
    assert complete(model, BYTES, ["a"])[0].ids == complete(model, BYTES, ["a"], seed=9)[0].ids     # no randomness asked for


def test_special_tokens_in_a_prompt_are_text_unless_asked_for() -> None:
    assert BYTES.eot not in BYTES.encode(f"a{tokenizers.EOT}b")
    assert BYTES.encode(f"a{tokenizers.EOT}b", specials=True).tolist() == [97, 256, 98]
    model = random_model()
    texts = {complete(model, BYTES, [f"a{tokenizers.EOT}"], max_new_tokens=9, specials=specials)[0].text
             for specials in (False, True)}
    assert len(texts) == 2


def picks(logits: list[float], context: tuple[int, ...] = (), n: int = 300, **settings: object) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {pick(torch.tensor(logits), Sampling(**settings), context, generator) for _ in range(n)}  # type: ignore[arg-type]


def test_picking_a_token() -> None:
    logits = [0.0, 3.0, 1.0, 2.0]
    p = torch.softmax(torch.tensor(logits), 0)
    assert picks(logits) == picks(logits, top_k=99) == picks(logits, top_k=0) == {0, 1, 2, 3}
    assert picks(logits, temperature=0) == picks(logits, temperature=1e-300) == picks(logits, top_k=1) == {1}
    assert picks(logits, top_k=2) == {1, 3}
    assert picks(logits, top_p=float(p[1]) - 0.01) == picks(logits, top_p=1e-9) == {1}
    assert picks(logits, top_p=float(p[1]) + 0.01) == {1, 3}
    assert picks(logits, min_p=1.0) == {1}
    assert picks(logits, min_p=float(p[3] / p[1]) - 0.01) == {1, 3}
    assert picks(logits, min_p=0.0) == {0, 1, 2, 3}
    assert picks(logits, temperature=0, logit_bias={0: 4.0}) == {0}
    assert 1 not in picks(logits, logit_bias={1: -math.inf})
    assert picks(logits, (1,), temperature=0, repetition_penalty=2.0) == {3}
    assert picks([-1.0, -1.5], (0,), temperature=0, repetition_penalty=2.0) == {1}
    assert picks(logits, (1, 1, 1), temperature=0, repetition_penalty=1.0) == {1}
    assert picks([0.0] * 5) == set(range(5))


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9999999}, {"min_p": 1e-9}])
def test_probabilities_are_those_of_the_temperature(settings: dict) -> None:
    logits, generator = torch.tensor([0.0, 1.0, -30.0]), torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0.5, **settings)
    share = sum(pick(logits, sampling, (), generator) for _ in range(4000)) / 4000
    assert share == pytest.approx(float(torch.sigmoid(torch.tensor(2.0))), abs=0.02)


@pytest.mark.parametrize(("settings", "message"), [
    ({"temperature": -1.0}, "--temperature"), ({"temperature": math.nan}, "--temperature"), ({"top_k": -1}, "--top-k"),
    ({"top_p": 0.0}, "--top-p"), ({"top_p": 1.5}, "--top-p"), ({"min_p": -0.1}, "--min-p"), ({"min_p": 2.0}, "--min-p"),
    ({"repetition_penalty": 0.0}, "--repetition-penalty"), ({"logit_bias": {1: math.inf}}, "--logit-bias")])
def test_values_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Sampling(**settings)


def test_what_cannot_be_written_is_refused() -> None:
    model = random_model()
    with pytest.raises(RequestError, match="empty stop string"):
        complete(model, BYTES, ["a"], stop=[""])
    with pytest.raises(RequestError, match="token 999"):
        complete(model, BYTES, ["a"], sampling=Sampling(logit_bias={999: 1.0}))
    with pytest.raises(RequestError, match="every token"):
        complete(model, BYTES, ["a"], sampling=Sampling(logit_bias=dict.fromkeys(range(257), -math.inf)))
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(Failure, match="not finite"):
        complete(model, BYTES, ["a"])


def test_the_model_is_left_as_it_was() -> None:
    model = random_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    next(write(model, BYTES, [Completion("a")]))        # left off in the middle
    assert all(getattr(module, "packed", None) is None for module in model.modules() if module is not model)
    assert model.packed_head is None
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()


def test_rows_of_the_vocabulary_that_the_tokenizer_lacks_are_never_written() -> None:
    model = random_model(vocab_size=400)
    with torch.no_grad():
        model.head_weight[257:] = 50 * model.head_weight[:143].abs()
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_k=5)):
        assert max(complete(model, BYTES, ["a"], max_new_tokens=30, sampling=sampling)[0].ids) < 257


def test_a_prompt_that_is_no_text_is_refused() -> None:
    for made in (BYTES, tokenizers.chars("abc"), tokenizers.Tokenizer.load("gpt2")):
        with pytest.raises(RequestError, match="no character"):
            made.encode("a\udcff")
