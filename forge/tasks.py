"""Zero-shot tasks over local files: multiple choice and completion by log-likelihood, with standard errors.

Prompts are those of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness) without examples, but every
text begins with the end-of-text token, as the documents of training do.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from forge.config import Failure, RequestError, nearest, parse_json
from forge.data.sources import OPENERS
from forge.model.transformer import Transformer
from forge.tokenizer import Tokenizer

# in one forward, padding included; on a CPU, 8192 took 1.7 times as long as 1024 (gpt-10m)
BATCH_TOKENS = {"cpu": 1024, "mps": 8192, "cuda": 8192}
CHUNK_LOGITS = 1 << 22      # logits held at once, 16 MiB in float32
PROGRESS_S = 30             # between two lines of progress

Ids = tuple[int, ...]


class Item(NamedTuple):
    choices: list[tuple[str, str]]      # (context, continuation), the space between them with the continuation
    gold: int                           # the right choice; an item with one choice is a completion
    paradigm: str = ""


class Likelihood(NamedTuple):
    nats: float         # log-likelihood of the continuation, <= 0
    greedy: bool        # each of its tokens is the likeliest


class Result(NamedTuple):
    """A task's figures; None where the task has no such figure.

    A standard error is that of a binomial sample, sqrt(p(1-p)/(n-1)), 0 for one item; the perplexity's is its own
    times the standard error of the mean log-likelihood (delta method).
    """

    accuracy: float                         # choices: the gold one has the largest log-likelihood; else: is greedy
    accuracy_stderr: float
    accuracy_norm: float | None             # by log-likelihood over the UTF-8 bytes of the choice
    accuracy_norm_stderr: float | None
    perplexity: float | None                # of the whole completion: exp of the mean of its negative nats
    perplexity_stderr: float | None
    chance: float                           # mean of 1/choices; 0 for a completion
    n: int
    left_out: int                           # items with characters that the tokenizer does not have
    seconds: float
    paradigms: dict[str, float] | None      # accuracy of each

    def numbers(self) -> dict[str, Any]:
        """What there is, by name, for JSON."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def field(record: dict[str, Any], key: str, kind: type) -> Any:
    """A record's field. Raises ValueError when it is missing or not of its kind (list: of texts)."""
    if key not in record:
        raise ValueError(f"no field {key!r} (it has: {', '.join(map(repr, list(record)[:8]))})")
    value = record[key]
    if type(value) is not kind or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
        wanted = {str: "a text", int: "a number", list: "a list of texts"}[kind]
        raise ValueError(f"field {key!r} is {json.dumps(value)[:40]}, not {wanted}")
    return value


def minimal_pair(record: dict[str, Any]) -> Item:
    """BLiMP (arXiv:1912.00582): which of two whole sentences is likelier."""
    sentences = [("", field(record, key, str)) for key in ("sentence_good", "sentence_bad")]
    return Item(sentences, 0, field(record, "UID", str))


def last_word(record: dict[str, Any]) -> Item:
    """LAMBADA (arXiv:1606.06031): the word that ends a passage."""
    return Item([(field(record, "context", str), " " + field(record, "continuation", str).strip())], 0)


def choices(record: dict[str, Any]) -> Item:
    """A sentence and its endings (COPA, OpenBookQA)."""
    query = field(record, "query", str)
    return Item([(query, " " + choice) for choice in field(record, "choices", list)], field(record, "gold", int))


def question(record: dict[str, Any]) -> Item:
    """"Question: ..." and its answers; the file holds the first word but not "Answer:" (ARC, PIQA)."""
    item = choices(record)
    return item._replace(choices=[(query.rstrip() + "\nAnswer:", answer) for query, answer in item.choices])


def schema(record: dict[str, Any]) -> Item:
    """Contexts that differ in a name, and one continuation: partial scoring, arXiv:1806.02847 (WinoGrande, WSC)."""
    continuation = " " + field(record, "continuation", str)
    return Item([(context, continuation) for context in field(record, "context_options", list)],
                field(record, "gold", int))


def activity(record: dict[str, Any]) -> Item:
    """HellaSwag (arXiv:1905.07830) from its raw fields. A cleaned ending may begin with a blank, as in the harness."""
    label, first, second = (field(record, key, str) for key in ("activity_label", "ctx_a", "ctx_b"))
    context = without_marks(f"{label}: {first} {second.capitalize()}")
    endings = [(context, " " + without_marks(ending)) for ending in field(record, "endings", list)]
    return Item(endings, int(field(record, "label", str)))


def without_marks(text: str) -> str:
    """A WikiHow text without its [header], [title], [step] and [substeps]."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


Reader = Callable[[dict[str, Any]], Item]       # raises ValueError for a record of another form
# name: (files without .jsonl, .jsonl.gz or .jsonl.bz2, of which the first found is read; reader of a record)
TASKS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "blimp": (("blimp",), minimal_pair),
    "lambada": (("lambada_openai", "lambada"), last_word),
    "hellaswag": (("hellaswag_val", "hellaswag"), activity),
    "arc_easy": (("arc_easy",), question),
    "arc_challenge": (("arc_challenge",), question),
    "piqa": (("piqa",), question),
    "openbook_qa": (("openbook_qa",), choices),
    "copa": (("copa",), choices),
    "winogrande": (("winogrande",), schema),
    "winograd_wsc": (("winograd_wsc",), schema),
}


def find(name: str, folder: Path) -> Path:
    """The file of a task. Raises RequestError for a task, folder or file that is not there."""
    if name not in TASKS:
        raise RequestError(f"--tasks {name}: there is no such task; {nearest(name, list(TASKS))}")
    if not folder.is_dir():
        raise RequestError(f"--tasks-dir {folder}: no such folder; name the one that holds the tasks' .jsonl files")
    wanted = [f"{stem}.jsonl{suffix}" for stem in TASKS[name][0] for suffix in OPENERS]
    for file in wanted:
        if (folder / file).is_file():
            return folder / file
    raise RequestError(f"--tasks-dir {folder}: no file for the task {name}; it would be {' or '.join(wanted)}")


def read(path: Path, reader: Reader) -> list[Item]:
    """The items of a file of JSON lines. Raises RequestError with the line that is none, or for an unreadable file."""
    items = []
    try:
        with OPENERS[path.suffix if path.suffix in OPENERS else ""](path) as stream:
            for number, line in enumerate(stream, 1):
                try:
                    if line.strip():
                        items.append(parse(line, reader))
                except ValueError as error:
                    raise RequestError(f"{path}, line {number}: {error}; mend the line or take it out") from error
    except (EOFError, zlib.error) as error:
        raise RequestError(f"{path}: the compressed stream is cut off or damaged ({error}); fetch it again") from error
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}; it cannot be read") from error
    if not items:
        raise RequestError(f"{path} holds no items; fetch it again")
    return items


def parse(line: bytes, reader: Reader) -> Item:
    """The item of one JSON line. Raises ValueError, which JSON's and Unicode's own errors are too."""
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    item = reader(record)
    if not 0 <= item.gold < len(item.choices):
        raise ValueError(f"the right answer is number {item.gold} of {len(item.choices)}, counted from 0")
    if any(not continuation.strip() for _, continuation in item.choices):
        raise ValueError("a choice is empty")
    "".join(text for choice in item.choices for text in choice).encode()     # half a surrogate pair is no character
    return item


def encode(tokenizer_encode: Callable[[str], Ids], context: str, continuation: str) -> tuple[Ids, Ids]:
    """The tokens of both: encoded together where that keeps the context's tokens, otherwise apart.

    Blanks that end the context go to the continuation, since a BPE joins them to what follows (as in the harness).
    """
    kept = context.rstrip()
    continuation = context[len(kept):] + continuation
    head, whole = tokenizer_encode(kept), tokenizer_encode(kept + continuation)
    return head, whole[len(head):] if whole[:len(head)] == head else tokenizer_encode(continuation)


@torch.no_grad()
def log_likelihoods(model: Transformer, requests: Sequence[tuple[Ids, Ids]],
                    say: Callable[[str], None] = lambda text: None) -> list[Likelihood]:
    """Of each request's continuation after its context, neither empty. Equal requests are computed once.

    Past seq_len the left of the context is cut off, and of a longer continuation only the last seq_len tokens count.
    Batches are nearly of one length, padded on the right, which a causal model does not see. Raises Failure when the
    model gives what is no number.
    """
    device, c = model.embedding.weight.device, model.config
    cut = [((context + wanted)[-c.seq_len - 1:], min(len(wanted), c.seq_len)) for context, wanted in requests]
    todo = sorted(set(cut), key=lambda request: (-len(request[0]), request))    # longest first: it needs most memory
    size = max(1, CHUNK_LOGITS // c.vocab_size)
    found: dict[tuple[Ids, int], Likelihood] = {}
    was_training, told = model.training, time.monotonic()
    model.eval()
    while len(found) < len(todo):
        width = len(todo[len(found)][0]) - 1
        batch = todo[len(found):len(found) + max(1, BATCH_TOKENS[device.type] // width)]
        inputs = pad_sequence([torch.tensor(tokens[:-1]) for tokens, _ in batch], batch_first=True)     # (B, width)
        at = [row * width + len(tokens) - 1 - n + i for row, (tokens, n) in enumerate(batch) for i in range(n)]
        targets = torch.tensor([token for tokens, n in batch for token in tokens[-n:]], device=device)
        with torch.compiler.set_stance("force_eager"):      # every batch has its shape: compiling would cost more
            x = model.hidden(inputs.to(device)).flatten(0, 1)[torch.tensor(at, device=device)]          # (N, C)
        nats, greedy = [], []
        for rows, target in zip(x.split(size), targets.split(size)):
            logits = model.logits(rows)                                                                 # (size, V)
            nats.append(logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1))
            greedy.append(logits.argmax(1) == target)
        sizes = [n for _, n in batch]
        each_nats, each_greedy = torch.cat(nats).cpu().double().split(sizes), torch.cat(greedy).cpu().split(sizes)
        for request, a, b in zip(batch, each_nats, each_greedy):
            found[request] = Likelihood(float(a.sum()), bool(b.all()))
        if time.monotonic() - told > PROGRESS_S and len(found) < len(todo):
            told = time.monotonic()
            say(f"{len(found):,} of {len(todo):,} texts, the longest first")
    model.train(was_training)
    if any(math.isnan(likelihood.nats) for likelihood in found.values()):
        raise Failure("the model's log-likelihoods are no numbers: its weights are damaged or have diverged")
    return [found[request] for request in cut]


def won(scores: list[float], gold: int) -> float:
    """1 when the gold score is the largest, 0 when it is not. Equal ones share: otherwise a model without any view
    would be right wherever the gold choice stands first.
    """
    best = max(scores)
    return (scores[gold] == best) / scores.count(best)


def rate(right: Sequence[float]) -> tuple[float, float]:
    """(p, its standard error) of a binomial sample: sqrt(p(1-p)/(n-1)); 0 for one item."""
    p = sum(right) / len(right)
    return p, math.sqrt(p * (1 - p) / max(1, len(right) - 1))


def result(items: Sequence[Item], found: Sequence[Sequence[Likelihood]], left_out: int, seconds: float) -> Result:
    """The figures of items and the likelihoods of their choices."""
    n = len(items)
    if len(items[0].choices) == 1:
        nats = np.array([likelihood.nats for likelihood, in found])
        perplexity = float(np.exp(-nats.mean()))
        error = perplexity * float(nats.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
        accuracy = rate([likelihood.greedy for likelihood, in found])
        return Result(*accuracy, None, None, perplexity, error, 0.0, n, left_out, seconds, None)
    right, right_norm, paradigms = [], [], defaultdict(list)
    for item, likelihoods in zip(items, found):
        scores = [likelihood.nats for likelihood in likelihoods]
        sizes = [len(choice.removeprefix(" ").encode()) for _, choice in item.choices]
        right.append(won(scores, item.gold))
        right_norm.append(won([a / b for a, b in zip(scores, sizes)], item.gold))
        paradigms[item.paradigm].append(right[-1])
    by_paradigm = {name: rate(paradigms[name])[0] for name in sorted(paradigms) if name}
    return Result(*rate(right), *rate(right_norm), None, None, sum(1 / len(item.choices) for item in items) / n, n,
                  left_out, seconds, by_paradigm or None)


def encode_items(tokenizer: Tokenizer, name: str, items: Sequence[Item], say: Callable[[str], None]
                 ) -> tuple[list[Item], list[list[tuple[Ids, Ids]]]]:
    """The items that the tokenizer can spell, and the requests of each. Raises RequestError when there is none."""
    ids = functools.cache(lambda text: tuple(tokenizer.encode(text).tolist()))
    kept, requests = [], []
    for item in items:
        try:
            encoded = [encode(ids, *choice) for choice in item.choices]
        except RequestError:        # a character that a chars tokenizer does not have
            continue
        kept.append(item)
        requests.append([((tokenizer.eot, *context), wanted) for context, wanted in encoded])
    unknown = f"{len(items) - len(kept):,} of {len(items):,} items have characters this tokenizer does not know"
    if not kept:
        raise RequestError(f"{name}: {unknown}; leave the task out, or train with --data.tokenizer bytes or bpe")
    if len(kept) < len(items):
        say(f"{name}: left out: {unknown}")
    return kept, requests


def run(model: Transformer, items: Sequence[Item], requests: list[list[tuple[Ids, Ids]]], left_out: int,
        say: Callable[[str], None]) -> Result:
    """The result of one task's encoded items, told as a line."""
    began = time.monotonic()
    flat = [request for of_item in requests for request in of_item]
    if long := sum(len(wanted) > model.config.seq_len for _, wanted in flat):
        say(f"{long:,} of {len(flat):,} continuations are longer than the {model.config.seq_len} tokens that the model "
            "reads; their last tokens count")
    likelihoods = iter(log_likelihoods(model, flat, say))
    found = [[next(likelihoods) for _ in of_item] for of_item in requests]
    r = result(items, found, left_out, time.monotonic() - began)
    other = (f"perplexity {r.perplexity:,.2f} ± {r.perplexity_stderr:,.2f}" if r.accuracy_norm is None else
             f"by byte {r.accuracy_norm:.3f} ± {r.accuracy_norm_stderr:.3f}")
    say(f"accuracy {r.accuracy:.3f} ± {r.accuracy_stderr:.3f} (chance {r.chance:.3f}), {other}, {r.n:,} items, "
        f"{r.seconds:.1f} s")
    return r


def run_tasks(model: Transformer, tokenizer: Tokenizer, names: Sequence[str], folder: str | Path, *,
              limit: int | None = None, say: Callable[[str], None] = print) -> dict[str, Result]:
    """The result of each task (a key of TASKS), its file in `folder`; a line to `say` as each is done.

    limit: score this many items of each task, spread evenly over its file (BLiMP's is in the order of its paradigms).
    Everything is read and encoded before the first is scored. Raises RequestError for an unknown task, a missing
    folder or file, a malformed line, a limit below 1, a task of which the tokenizer can spell nothing; Failure for a
    model that gives no numbers.
    """
    if limit is not None and limit < 1:
        raise RequestError(f"--limit {limit}: at least 1 item of each task is needed")
    encoded = {}
    for name, path in {name: find(name, Path(folder)) for name in names}.items():
        items = read(path, TASKS[name][1])
        count = min(limit or len(items), len(items))
        items = [items[i * len(items) // count] for i in range(count)]
        encoded[name] = count, *encode_items(tokenizer, name, items, say)

    def score(name: str) -> Result:
        count, items, requests = encoded[name]
        return run(model, items, requests, count - len(items), lambda text: say(f"{name}: {text}"))

    return {name: score(name) for name in encoded}
