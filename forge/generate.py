"""A model writes: prefill, decode a token at a time from the cache, sample. Many sequences go side by side, each with a
length and a random generator of its own, and none changes another's text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from forge import checkpoint as checkpoints
from forge.config import Failure, RequestError, load_json
from forge.data.prepare import tokenizer_of
from forge.machine import pick_device, settle_cpu
from forge.model.transformer import Cache, Transformer
from forge.tokenizer import Tokenizer

ROWS = 16       # sequences in one decoding step


@dataclass(frozen=True)
class Sampling:
    """How a token is taken from the logits, in this order."""

    repetition_penalty: float = 1.0
    """logits of tokens already in the context are divided by this, negative ones multiplied (arXiv:1909.05858)"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """what is added to the logits of these token ids; -inf rules one out"""
    temperature: float = 1.0
    """below 1 likelier, above 1 wilder; 0 always takes the likeliest token"""
    top_k: int = 0
    """take only from the k likeliest tokens; 0: from all"""
    top_p: float = 1.0
    """take only from the likeliest tokens that together have this probability (arXiv:1904.09751)"""
    min_p: float = 0.0
    """take only from tokens at least this part as likely as the likeliest (arXiv:2407.01082)"""

    def __post_init__(self) -> None:
        for name, fits, need in (
                ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1: none)"),
                ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
                ("top_k", self.top_k >= 0, "0 (all) or more"),
                ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (all)"),
                ("min_p", 0 <= self.min_p <= 1, "between 0 (all) and 1"),
                ("logit_bias", all(b < math.inf for b in self.logit_bias.values()), "numbers or -inf")):
            if not fits:
                raise RequestError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be {need}")


@dataclass
class Completion:
    """What a model writes after a prompt; `write` fills it."""

    prompt: str
    seed: int = 1
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """of each id, in nats, under the model itself: before penalty, bias, temperature and cuts"""
    finish: str = ""
    """length; end: the model ended the document; stop: a stop string came, which the text does not hold"""


@dataclass
class Row:
    """A sequence being written: the prompt's ids and those after it; its cache holds what follows `begin`."""

    ids: list[int]
    begin: int = -1
    cache: Cache | None = None


def load_model(run: str | Path, *, checkpoint: str = "best", device: str = "auto", dtype: torch.dtype | None = None
               ) -> tuple[Transformer, Tokenizer]:
    """The model of a run, ready to evaluate, and its tokenizer.

    checkpoint: best (lowest validation loss), latest, or a step. dtype: of the computation; None: as it was trained.
    The model is a torch module: model(inputs, targets) with (B, T) int64 each gives mean nats per token;
    model.logits(model.hidden(inputs)) gives (B, T, V) float32.
    Raises RequestError for a run or checkpoint that is not there; Failure for a damaged one.
    """
    run = Path(run)
    if not run.is_dir():
        raise RequestError(f"{run}: no such run folder; `forge train` makes one and prints its name")
    settle_cpu()
    config = load_json(run / "config.json")
    found = checkpoints.load(run, checkpoint)
    tokenizer = tokenizer_of(run)
    with torch.device("meta"):
        model = Transformer(config.model, dtype or getattr(torch, config.train.dtype))
    model.to_empty(device=pick_device(device))
    load_weights(model, found)
    return model.eval(), tokenizer


def load_weights(model: Transformer, found: checkpoints.Checkpoint) -> None:
    """Copies a checkpoint's weights into the model. Raises Failure when they are not of its shape.

    Copied, not taken over: a file's tensors begin anywhere, and on a CPU a product's last bit depends on alignment.
    """
    try:
        model.load_state_dict(found.weights)
    except RuntimeError as error:
        raise Failure(f"{found.path} does not hold this model's weights: {error}") from error


def sample(run: str | Path, prompt: str = "", *, max_new_tokens: int = 200, temperature: float = 0.8, top_k: int = 0,
           top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0,
           logit_bias: Mapping[int, float] | None = None, stop: Sequence[str] = (), seed: int = 1,
           checkpoint: str = "best", device: str = "auto") -> str:
    """What a run's model writes after the prompt, without the prompt. An empty prompt begins a document.

    Arguments as in Sampling and `complete`. Raises RequestError as load_model does, for a value out of range, and for a
    prompt that cannot be encoded.
    """
    sampling = Sampling(repetition_penalty, logit_bias or {}, temperature, top_k, top_p, min_p)
    model, tokenizer = load_model(run, checkpoint=checkpoint, device=device)
    written = complete(model, tokenizer, [prompt], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, seed=seed)
    return written[0].text


def complete(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], *, n: int = 1, max_new_tokens: int = 200,
             sampling: Sampling | None = None, stop: Sequence[str] = (), seed: int = 1, logprobs: bool = False,
             specials: bool = False) -> list[Completion]:
    """n completions of each prompt: first those of the first prompt. The i-th has the seed `seed + i`.

    The other arguments as in `write`.
    """
    completions = [Completion(prompt, seed + i) for prompt in prompts for i in range(n)]
    for _ in write(model, tokenizer, completions, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop,
                   logprobs=logprobs, specials=specials):
        pass
    return completions


def write(model: Transformer, tokenizer: Tokenizer, completions: Sequence[Completion], *, max_new_tokens: int = 200,
          sampling: Sampling | None = None, stop: Sequence[str] = (), logprobs: bool = False, specials: bool = False
          ) -> Iterator[tuple[Completion, str]]:
    """Fills the completions side by side and yields (completion, new text) as it comes.

    A prompt and a seed give one text, whatever else is written beside it. Past seq_len the context goes on with its
    newer half (context_start); of a longer prompt the model sees the end.
    sampling: how tokens are taken, likeliest first where None. stop: a completion ends before any of these strings.
    logprobs: fills Completion.logprobs. specials: special tokens that a prompt spells out become those tokens.
    Raises RequestError for an empty stop string, a bias on a token that is not there, or a prompt that cannot be encoded;
    Failure when the logits are no numbers.
    """
    sampling = sampling or Sampling(temperature=0)
    if "" in stop:
        raise RequestError("an empty stop string would end every text before it begins; leave it out")
    for token in sampling.logit_bias:
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError(f"logit_bias: token {token} is not among the tokenizer's {tokenizer.vocab_size:,}; give ids "
                               f"from 0 to {tokenizer.vocab_size - 1}")
    rows = [Row([tokenizer.eot, *tokenizer.encode(c.prompt, specials).tolist()]) for c in completions]
    generators = [torch.Generator().manual_seed(c.seed) for c in completions]
    decoders = [tokenizer.decoder() for _ in completions]
    held = [""] * len(rows)     # text that may be the beginning of a stop string
    live = list(range(len(rows))) if max_new_tokens else []
    for c in completions:
        c.finish = "" if max_new_tokens else "length"
    with model.packed(ROWS), torch.compiler.set_stance("force_eager"):
        while live:
            now = live[:ROWS]
            for i, logits in zip(now, next_logits(model, [rows[i] for i in now])):
                c, row = completions[i], rows[i]
                token = pick(logits[:tokenizer.vocab_size], sampling, row.ids, generators[i])   # a model may have more rows
                piece = None
                if token == tokenizer.eot:
                    c.finish = "end"
                else:
                    if logprobs:
                        c.logprobs.append(float(torch.log_softmax(logits.double(), 0)[token]))
                    row.ids.append(token)
                    c.ids.append(token)
                    piece = decoders[i](token)
                    c.finish = "length" if len(c.ids) == max_new_tokens else ""
                if c.finish:
                    piece = (piece or "") + decoders[i](None)
                new, held[i], stopped = until_stop(held[i] + (piece or ""), stop, last=bool(c.finish))
                c.finish = "stop" if stopped else c.finish
                c.text += new
                if c.finish:
                    live.remove(i)
                    row.cache = None
                yield c, new


def until_stop(text: str, stop: Sequence[str], last: bool) -> tuple[str, str, bool]:
    """(what can be said, what is held back, whether a stop string came); held back is what may begin a stop string."""
    found = [at for s in stop if (at := text.find(s)) >= 0]
    if found:
        return text[:min(found)], "", True
    hold = 0 if last else max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return text[:len(text) - hold], text[len(text) - hold:], False


def context_start(n: int, seq_len: int) -> int:
    """Where the context of token n begins: at 0 while all fit into seq_len, then half a window is dropped at a time."""
    half = max(1, seq_len // 2)
    return 0 if n <= seq_len else -(-(n - seq_len) // half) * half


@torch.inference_mode()
def next_logits(model: Transformer, rows: Sequence[Row]) -> Tensor:
    """The logits (rows, V), on the CPU, of the token after each row's ids; append to the ids before the next call.

    Each equals the full forward over ids[context_start(len(ids), seq_len):], and is the same to the bit whatever other
    rows there are: a context is read by itself, and a product over the rows always has the shape that it needs for that.
    """
    seq_len, device = model.config.seq_len, model.embedding.weight.device
    last: dict[int, Tensor] = {}
    read: dict[tuple[int, ...], int] = {}       # contexts that several rows begin with are read once
    for i, row in enumerate(rows):
        begin = context_start(len(row.ids), seq_len)
        if row.cache is None or begin != row.begin:
            row.begin, context = begin, tuple(row.ids[begin:])
            if (twin := read.setdefault(context, i)) != i:
                row.cache, last[i] = copy.deepcopy(rows[twin].cache), last[twin]
            else:
                row.cache = Cache(model.config, seq_len, device, model.dtype)
                last[i] = model.hidden(torch.tensor([context], device=device), caches=[row.cache])[0, -1]
    others = [i for i in range(len(rows)) if i not in last]
    # oneDNN's packed products give a row the same bits from 2 rows on, others are only sure to in a product of one shape
    width = max(2, len(rows)) if model.packed_head is not None and model.packed_head.is_mkldnn else ROWS
    if others:
        tokens = torch.zeros(width, 1, dtype=torch.long, device=device)
        tokens[:len(others), 0] = torch.tensor([rows[i].ids[-1] for i in others])
        x = model.hidden(tokens, caches=[cache for i in others if (cache := rows[i].cache)])
        last |= {i: x[k, 0] for k, i in enumerate(others)}
    x = torch.zeros(width, model.config.dim, device=device, dtype=model.dtype)
    for i in range(len(rows)):
        x[i] = last[i]
    return model.logits(x)[:len(rows)].cpu()


def pick(logits: Tensor, sampling: Sampling, context: Sequence[int], generator: torch.Generator) -> int:
    """One token of logits (V,), as Sampling says. Raises Failure when they are no numbers."""
    if not bool(torch.isfinite(logits).all()):
        raise Failure("the model's logits are not finite: its weights are damaged, or its training ran away")
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(context)))
        values = logits[seen]
        logits = logits.index_put((seen,), torch.where(values > 0, values / sampling.repetition_penalty,
                                                       values * sampling.repetition_penalty))
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias))
        logits = logits.index_put((ids,), logits[ids] + torch.tensor(list(sampling.logit_bias.values())))
        if float(logits.max()) == -math.inf:
            raise RequestError("logit_bias rules out every token; leave one in")
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, order = logits.double(), None
    if sampling.top_k and sampling.top_k < len(values):
        values, order = torch.topk(values, sampling.top_k)
    elif sampling.top_p < 1:
        values, order = torch.sort(values, descending=True, stable=True)
    p = torch.softmax((values - values.max()) / sampling.temperature, 0)
    if sampling.top_p < 1:
        p = torch.where(p.cumsum(0) - p < sampling.top_p, p, 0.0)
    if sampling.min_p:
        p = torch.where(p >= sampling.min_p * p.max(), p, 0.0)
    total = p.cumsum(0)
    drawn = torch.rand((), dtype=torch.float64, generator=generator) * total[-1]
    at = int(torch.searchsorted(total, drawn, right=True).clamp(max=len(p) - 1))
    return int(at if order is None else order[at])
