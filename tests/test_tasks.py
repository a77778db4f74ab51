"""Tasks against a computation without batches, against models whose answers are known, and over their files."""

from __future__ import annotations

import bz2
import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forge import tasks
from forge import tokenizer as tokenizers
from forge.config import Failure, ModelConfig, RequestError
from forge.model.transformer import Transformer, init_weights
from forge.tasks import TASKS, Item, Likelihood, encode, encode_items, log_likelihoods, rate, run_tasks, won
from forge.tokenizer import Tokenizer

TEXT = "the forge is hot, and the iron is red: so we strike while it glows; née 八 🙂 " * 20
GPT2: dict[str, Any] = {"norm": "layer", "mlp": "gelu", "position": "learned", "qk_norm": False, "bias": True,
                        "tied": True}
ODD: dict[str, Any] = {"window": 3, "softcap": 3.0, "dropout": 0.5}


def tokenizer_of(kind: str) -> Tokenizer:
    return {"chars": lambda: tokenizers.chars(TEXT), "bytes": tokenizers.byte_tokens,
            "bpe": lambda: tokenizers.train_bpe([TEXT], len(TEXT), 320)}[kind]()


def model_of(vocab_size: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    config = ModelConfig(**{"vocab_size": vocab_size, "seq_len": 24, "dim": 16, "n_layers": 2, "n_heads": 2, **changes})
    model = Transformer(config.resolve(), dtype).to(dtype)
    init_weights(model, 0)
    with torch.no_grad():       # biases and gains too, and logits that differ
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


def successor_model(tokenizer: Tokenizer, order: str, sign: float = 1.0) -> Transformer:
    """After each character of `order` (a circle) it expects the next; with sign -1 anything rather than that."""
    V = tokenizer.vocab_size
    model = Transformer(ModelConfig(vocab_size=V, seq_len=32, dim=2 * V, n_layers=1, n_heads=1).resolve())
    ids = tokenizer.encode(order).tolist()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 if p.dim() == 1 else 0.0)       # blocks that add nothing
        model.embedding.weight[:, :V] = torch.eye(V)
        assert model.head is not None
        for a, b in zip(ids, ids[1:] + ids[:1]):
            model.head.weight[b, a] = 3 * sign
    return model


def write(folder: Path, name: str, records: list[Any], opener: Any = open) -> Path:
    path = folder / name
    with opener(path, "wb") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in records).encode())
    return path


def pairs(good: list[str], bad: list[str]) -> list[dict[str, str]]:
    return [{"UID": f"p{i % 2}", "sentence_good": g, "sentence_bad": b} for i, (g, b) in enumerate(zip(good, bad))]


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize("kind", tokenizers.KINDS)
@pytest.mark.parametrize("changes", [{}, GPT2, ODD], ids=["modern", "gpt2", "odd"])
def test_batches_equal_one_sequence_at_a_time(kind: str, changes: dict[str, Any],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "BATCH_TOKENS", {"cpu": 60})
    monkeypatch.setattr(tasks, "CHUNK_LOGITS", 3000)
    tokenizer, draw = tokenizer_of(kind), random.Random(1)
    model = model_of(tokenizer.vocab_size, torch.float64, **changes)

    def log_probabilities(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model.eval().logits(model.hidden(torch.tensor([ids]))[0]), -1)

    texts = [(TEXT[a:a + draw.choice([0, 1, 4, 9, 80])], TEXT[b:b + draw.choice([1, 2, 5, 22, 40])])
             for a, b in ((draw.randrange(200), draw.randrange(200)) for _ in range(40))]
    requests = [((tokenizer.eot, *tokenizer.encode(a).tolist()), tuple(tokenizer.encode(b).tolist())) for a, b in texts]
    requests.append(((tokenizer.eot,), (int(log_probabilities([tokenizer.eot])[0].argmax()),)))
    got = log_likelihoods(model.train(), requests)
    assert model.training
    assert {likelihood.greedy for likelihood in got} == {True, False}
    for (context, wanted), likelihood in zip(requests, got):
        ids = [*context, *wanted][-25:]         # 24 are read, and the last is only foretold
        n = min(len(wanted), 24)
        logp = log_probabilities(ids[:-1])[-n:]
        assert likelihood.nats == pytest.approx(sum(float(logp[i, ids[-n + i]]) for i in range(n)), rel=1e-10)
        assert likelihood.greedy == (logp.argmax(-1).tolist() == ids[-n:])


def test_equal_requests_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = model_of(10), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda inputs: (rows.append(len(inputs)), hidden(inputs))[1])
    a, b, _ = log_likelihoods(model, [((9, 1), (2,)), ((9, 1), (2,)), ((9, 1), (3,))])
    assert a == b
    assert sum(rows) == 2


def test_a_context_is_cut_at_its_left() -> None:
    model = model_of(10, **GPT2)
    context = (9, *range(8), *range(8), *range(8))      # with (3, 4) 27 tokens, of which 24 are read and 1 foretold
    long, short = log_likelihoods(model, [(context, (3, 4)), (context[2:], (3, 4))])
    assert long == short


@pytest.mark.parametrize(("context", "continuation", "parts"), [
    ("the iron", " is", ("the iron", " is")), ("the iron ", "is", ("the iron", " is")), ("", "iron", ("", "iron")),
    ("the ir", "on is", ("the ir", "on is"))])      # where the whole has other tokens, the two are encoded apart
def test_context_and_continuation_in_tokens(context: str, continuation: str, parts: tuple[str, str]) -> None:
    tokenizer = tokenizer_of("bpe")
    head, tail = encode(lambda text: tuple(tokenizer.encode(text).tolist()), context, continuation)
    assert (tokenizer.decode(head), tokenizer.decode(tail)) == parts
    assert list(head) == tokenizer.encode(parts[0]).tolist()


@pytest.mark.parametrize(("sign", "share"), [(1.0, 1.0), (-1.0, 0.0)])
def test_a_model_that_knows_scores_1_and_its_mirror_0(sign: float, share: float, tmp_path: Path) -> None:
    tokenizer = tokenizers.chars(" abcdefg:\nAnswer")
    model = successor_model(tokenizer, "abc defg", sign)
    write(tmp_path, "blimp.jsonl", pairs(["abc d", "efga", "bc"], ["abc e", "efag", "cb"]))
    write(tmp_path, "lambada.jsonl", [{"context": "gabc", "continuation": word} for word in ("defg", "d")])
    write(tmp_path, "copa.jsonl", [{"query": "abc", "choices": ["abc", "defg"], "gold": 1},
                                   {"query": "abc", "choices": ["de", "gf"], "gold": 0}])
    write(tmp_path, "winogrande.jsonl", [{"context_options": ["aab", "abc"], "continuation": "d", "gold": 1}])
    results = run_tasks(model, tokenizer, ["blimp", "lambada", "copa", "winogrande"], tmp_path, say=quiet)
    lambada = results.pop("lambada")
    assert lambada.accuracy == share
    assert lambada.perplexity is not None
    assert (lambada.perplexity < 1.1) == (sign > 0)
    assert results["blimp"].paradigms == {"p0": share, "p1": share}
    for result in results.values():
        assert (result.accuracy, result.accuracy_norm, result.chance) == (share, share, 0.5)
        assert result.accuracy_stderr == 0


@pytest.mark.parametrize("name", ["blimp", "piqa"])
def test_a_random_model_scores_chance(name: str, tmp_path: Path) -> None:
    """The right answer is drawn by lot, so that no bias of the model can matter."""
    draw = random.Random(0)
    words = [["".join(draw.choices("abcdefgh ", k=draw.randint(2, 9))) + "." for _ in range(2)] for _ in range(400)]
    write(tmp_path, "blimp.jsonl", pairs(*map(list, zip(*words))))
    write(tmp_path, "piqa.jsonl", [{"query": "Question: which?\n", "choices": two, "gold": draw.randrange(2)}
                                   for two in words])
    result = run_tasks(model_of(257, **GPT2), tokenizers.byte_tokens(), [name], tmp_path, say=quiet)[name]
    assert result.n == 400
    assert result.accuracy_norm is not None
    assert result.accuracy_stderr == pytest.approx(0.025, rel=0.05)
    assert abs(result.accuracy - 0.5) < 4 * result.accuracy_stderr
    assert abs(result.accuracy_norm - 0.5) < 4 * result.accuracy_stderr


CHOICES = {"query": "Question: Why?", "choices": ["no", "yes"], "gold": 1}
SCHEMA = {"context_options": ["Ann so Ann", "Ann so Bo"], "continuation": "left.", "gold": 0}
QUESTION = Item([("Question: Why?\nAnswer:", " no"), ("Question: Why?\nAnswer:", " yes")], 1)
FORMS = {
    "blimp.jsonl.bz2": ({"UID": "x", "pairID": "0", "sentence_good": "Yes.", "sentence_bad": "Is."},
                        Item([("", "Yes."), ("", "Is.")], 0, "x")),
    "lambada_openai.jsonl.gz": ({"context": "He saw the", "continuation": "sea"}, Item([("He saw the", " sea")], 0)),
    "hellaswag_val.jsonl": ({"activity_label": "Tea", "ctx_a": "[header] How to [title] Boil. [step] Take  it.",
                             "ctx_b": "the Cup", "endings": ["is [substeps] hot.", "[step] off"], "label": "1"},
                            Item([("Tea: How to. Boil. Take it. The cup", " is hot."),
                                  ("Tea: How to. Boil. Take it. The cup", "  off")], 1)),
    "arc_easy.jsonl": (CHOICES, QUESTION), "arc_challenge.jsonl.bz2": (CHOICES, QUESTION),
    "piqa.jsonl.gz": (CHOICES | {"query": "Question: Why?\n"}, QUESTION),
    "openbook_qa.jsonl": (CHOICES, Item([("Question: Why?", " no"), ("Question: Why?", " yes")], 1)),
    "copa.jsonl": (CHOICES | {"query": "So", "gold": 0}, Item([("So", " no"), ("So", " yes")], 0)),
    "winogrande.jsonl": (SCHEMA, Item([("Ann so Ann", " left."), ("Ann so Bo", " left.")], 0)),
    "winograd_wsc.jsonl": (SCHEMA, Item([("Ann so Ann", " left."), ("Ann so Bo", " left.")], 0)),
}


@pytest.mark.parametrize(("file", "task"), zip(FORMS, TASKS))
def test_readers(file: str, task: str, tmp_path: Path) -> None:
    record, item = FORMS[file]
    opener = {".gz": gzip.open, ".bz2": bz2.open}.get(Path(file).suffix, open)
    path = write(tmp_path, file, [record, record], opener)
    assert tasks.find(task, tmp_path) == path
    assert tasks.read(path, TASKS[task][1]) == [item, item]
    result = run_tasks(model_of(257), tokenizers.byte_tokens(), [task], tmp_path, say=quiet)[task]
    numbers = json.loads(json.dumps(result.numbers()))
    assert numbers["n"] == 2
    assert ("perplexity" in numbers) == (task == "lambada") == ("accuracy_norm" not in numbers)
    assert ("paradigms" in numbers) == (task == "blimp")
    assert numbers["chance"] == (0 if task == "lambada" else 0.5)


@pytest.mark.parametrize(("line", "fault"), [
    ("{", "Expecting"), ("[1]", "a JSON list"), ('{"query": "a", "choices": ["b", "c"]}', "no field 'gold'"),
    ('{"query": 3, "choices": ["b"], "gold": 0}', "'query' is 3, not a text"), ("\udcff", "utf-8"),
    ('{"query": "a", "choices": "b", "gold": 0}', "list of texts"),
    ('{"query": "a", "choices": ["b"], "gold": 1}', "number 1 of 1"),
    ('{"query": "a", "choices": ["b", ""], "gold": 1}', "empty"),
    ('{"query": "\\ud800", "choices": ["b"], "gold": 0}', "surrogate")])
def test_a_malformed_line_is_named(line: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "copa.jsonl").write_bytes(b'{"query": "a", "choices": ["b", "c"], "gold": 0}\n\n'
                                          + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(RequestError, match=rf"copa\.jsonl, line 3: .*{fault}"):
        run_tasks(model_of(257), tokenizers.byte_tokens(), ["copa"], tmp_path)


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    model, tokenizer = model_of(257), tokenizers.byte_tokens()
    with pytest.raises(RequestError, match=r"helaswag: .* did you mean hellaswag\?"):
        run_tasks(model, tokenizer, ["helaswag"], tmp_path)
    with pytest.raises(RequestError, match="no such folder"):
        run_tasks(model, tokenizer, ["blimp"], tmp_path / "none")
    with pytest.raises(RequestError, match=r"lambada_openai\.jsonl or .*lambada\.jsonl\.bz2"):
        run_tasks(model, tokenizer, ["lambada"], tmp_path)
    with pytest.raises(RequestError, match="at least 1"):
        run_tasks(model, tokenizer, ["blimp"], tmp_path, limit=0)
    write(tmp_path, "blimp.jsonl", [])
    with pytest.raises(RequestError, match="no items"):
        run_tasks(model, tokenizer, ["blimp"], tmp_path)
    packed = write(tmp_path, "copa.jsonl.gz", [CHOICES] * 9, gzip.open)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(RequestError, match="cut off"):
        run_tasks(model, tokenizer, ["copa"], tmp_path)
    torch.nn.init.constant_(model.norm.weight, math.nan)
    write(tmp_path, "blimp.jsonl", pairs(["a"], ["b"]))
    with pytest.raises(Failure, match="no numbers"):
        run_tasks(model, tokenizer, ["blimp"], tmp_path)


def test_items_that_a_tokenizer_cannot_spell_are_left_out_aloud(tmp_path: Path) -> None:
    tokenizer, said = tokenizers.chars("ab"), []
    model = model_of(tokenizer.vocab_size)
    write(tmp_path, "blimp.jsonl", pairs(["ab", "aé", "ba", "b"], ["bb", "b", "aa", "x"]))
    result = run_tasks(model, tokenizer, ["blimp"], tmp_path, say=said.append)["blimp"]
    assert (result.n, result.left_out) == (2, 2)
    assert said[0] == "blimp: left out: 2 of 4 items have characters this tokenizer does not know"
    write(tmp_path, "blimp.jsonl", pairs(["x"], ["y"]))
    with pytest.raises(RequestError, match=r"1 of 1 items .*tokenizer bytes"):
        run_tasks(model, tokenizer, ["blimp"], tmp_path)


def test_a_limit_is_spread_over_the_file_and_long_continuations_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path, "blimp.jsonl", [{"UID": f"p{i // 5}", "sentence_good": "a" * (i + 20), "sentence_bad": "b"}
                                    for i in range(10)])
    result = run_tasks(model_of(257), tokenizers.byte_tokens(), ["blimp"], tmp_path, limit=4, say=said.append)["blimp"]
    assert result.n == 4
    assert result.paradigms is not None
    assert list(result.paradigms) == ["p0", "p1"]
    assert said[0].startswith("blimp: 2 of 8 continuations are longer than the 24 tokens")  # 25, 27 of 20, 22, 25, 27


def test_rates_and_ties() -> None:
    assert rate([1.0, 0.0, 0.0, 0.0]) == (0.25, pytest.approx(math.sqrt(0.25 * 0.75 / 3)))
    assert rate([1.0]) == (1.0, 0.0)
    assert [won([-1.0, -2.0], 0), won([-1.0, -2.0], 1), won([-1.0, -1.0, -3.0], 0)] == [1, 0, 0.5]
    items = [Item([("", "ab"), ("", "abcd")], 0), Item([("", " é"), ("", " ab"), ("", " abc")], 2)]
    likelihoods = [[Likelihood(-2.0, False), Likelihood(-3.0, False)],
                   [Likelihood(-2.0, False), Likelihood(-4.0, False), Likelihood(-3.0, False)]]
    result = tasks.result(items, likelihoods, 0, 0.0)
    assert (result.accuracy, result.accuracy_norm) == (0.5, 0.25)       # by byte: -1, -.75; -1, -2, -1: two share
    assert result.chance == pytest.approx((1 / 2 + 1 / 3) / 2)
    words = tasks.result([Item([("", "a")], 0)] * 2, [[Likelihood(-1.0, True)], [Likelihood(-2.0, False)]], 0, 0.0)
    assert words.perplexity == pytest.approx(math.exp(1.5))
    assert words.perplexity_stderr == pytest.approx(math.exp(1.5) * 0.5)


def test_each_document_begins_with_the_end_of_text() -> None:
    tokenizer = tokenizers.byte_tokens()
    _, requests = encode_items(tokenizer, "blimp", [Item([("", "a"), ("b ", "c")], 0)], quiet)
    assert requests == [[((256,), (97,)), ((256, 98), (32, 99))]]
