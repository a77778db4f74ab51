"""A model writes: prefill, decode one token at a time from the cache, sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from forge import checkpoint as checkpoints
from forge.config import Failure, RequestError, load_json
from forge.machine import pick_device, settle_cpu
from forge.model.transformer import Cache, Transformer
from forge.tokenizer import Tokenizer


def load_model(run: str | Path, *, checkpoint: str = "best", device: str = "auto", dtype: torch.dtype | None = None
               ) -> tuple[Transformer, Tokenizer]:
    """The model of a run, ready to evaluate, and its tokenizer.

    checkpoint: best (lowest validation loss), latest, or a step. dtype: of the computation; None: as it was trained.
    Raises RequestError for a run or checkpoint that is not there; Failure for a damaged one.
    """
    run = Path(run)
    if not run.is_dir():
        raise RequestError(f"{run}: no such run folder; `forge train` makes one and prints its name")
    settle_cpu()
    config = load_json(run / "config.json")
    found = checkpoints.load(run, checkpoint)
    tokenizer = Tokenizer.load(run / "tokenizer.json")
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
           top_p: float = 1.0, seed: int = 1, checkpoint: str = "best", device: str = "auto") -> str:
    """What a run's model writes after the prompt, without the prompt. An empty prompt begins a document.

    Arguments as in `generate`. Raises RequestError as load_model does, and for a prompt that cannot be encoded.
    """
    model, tokenizer = load_model(run, checkpoint=checkpoint, device=device)
    ids = generate(model, start(tokenizer, prompt), max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                   seed=seed, eot=tokenizer.eot)
    return tokenizer.decode(ids)


def start(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens as the beginning of a document."""
    return [tokenizer.eot, *tokenizer.encode(prompt).tolist()]


def context_start(n: int, seq_len: int) -> int:
    """Where the context of token n begins: at 0 while all fit into seq_len, then half a window is dropped at a time."""
    half = max(1, seq_len // 2)
    return 0 if n <= seq_len else -(-(n - seq_len) // half) * half


@torch.no_grad()
def next_logits(model: Transformer, ids: list[int]) -> Iterator[Tensor]:
    """The logits (V,) of the token after ids, again and again: append the token to ids before asking for the next.

    Equal to the full forward over ids[context_start(len(ids), seq_len):].
    """
    seq_len, device = model.config.seq_len, model.embedding.weight.device
    begin, cache = -1, None
    while True:
        if cache is None or context_start(len(ids), seq_len) != begin:
            begin = context_start(len(ids), seq_len)
            cache = Cache(model.config, 1, seq_len, device, model.dtype)
        new = torch.tensor([ids[begin + cache.length:]], device=device)
        yield model.logits(model.hidden(new, cache=cache)[0, -1])


def generate(model: Transformer, prompt: list[int], max_new_tokens: int, *, temperature: float = 1.0, top_k: int = 0,
             top_p: float = 1.0, seed: int = 1, eot: int | None = None) -> Iterator[int]:
    """Token ids after the prompt (at least one id), at most max_new_tokens, ending before eot.

    temperature 0 takes the likeliest token; top_k 0 and top_p 1 leave all tokens in. One seed gives one text.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    logits = next_logits(model, ids)
    for _ in range(max_new_tokens):
        token = pick(next(logits).cpu(), temperature, top_k, top_p, generator)
        if token == eot:
            return
        ids.append(token)
        yield token


def pick(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token of logits (V,): scaled by the temperature, cut to the top_k likeliest, then to the fewest whose
    probabilities reach top_p (nucleus sampling, arXiv:1904.09751).
    """
    if temperature == 0:
        return int(logits.argmax())
    values, order = torch.sort(logits.double() / temperature, descending=True, stable=True)
    if top_k:
        values = values[:top_k]
    p = torch.softmax(values, 0)
    p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)
    return int(order[torch.multinomial(p, 1, generator=generator)])
