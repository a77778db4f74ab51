"""Token shards -> batches. Which window comes when is a pure function of (seed, epoch, index).

The tokens are a ring: every window is seq_len long, starts anywhere, and runs on from the last token to the first.
An epoch shifts the ring by a random offset and takes its windows, side by side, in a random order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge.config import Failure, RequestError, parse_json


class Batch(NamedTuple):
    inputs: Tensor              # (B, T) int64
    targets: Tensor             # (B, T) int64; -1 is not counted
    starts: Tensor | None       # (B, T) int32, the first position each may see; None: all are of one document


class Tokens:
    """The memory-mapped tokens of one part of a data folder. Raises RequestError when another tokenizer made them."""

    def __init__(self, folder: Path, tokenizer_hash: str) -> None:
        try:
            raw = (folder / "index.json").read_bytes()
            index, self.hash = parse_json(raw), hashlib.sha256(raw).hexdigest()        # which holds those of the shards
            self.bytes, self.documents, self.eot = index["bytes"], index["documents"], index["eot"]
            made_by, dtype = index["tokenizer"], np.dtype(index["dtype"])
            files = [(folder / Path(shard["file"]).name, shard["tokens"]) for shard in index["shards"]]     # none elsewhere
            if dtype not in (np.uint16, np.uint32) or not files:
                raise ValueError(f"tokens of dtype {dtype} in {len(files)} shards")
            for path, n_tokens in files:
                if path.stat().st_size != n_tokens * dtype.itemsize:
                    raise Failure(f"{path} is damaged: {path.stat().st_size} bytes, and index.json says "
                                  f"{n_tokens * dtype.itemsize}; prepare the data again")
            self.shards = [np.memmap(path, dtype, mode="r") for path, _ in files]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Failure(f"{folder} is no data folder, or damaged: {error}") from error
        if made_by != tokenizer_hash:
            raise RequestError(f"{folder} was made with another tokenizer ({made_by[:12]}) than this one "
                               f"({tokenizer_hash[:12]}); prepare the text again with: forge data prepare TEXT "
                               "--tokenizer FILE --out DIR")
        self.ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """count tokens from start on, around the ring, (count,) int64."""
        out = np.empty(count, np.int64)
        filled = 0
        while filled < count:
            at = (start + filled) % len(self)
            shard = int(np.searchsorted(self.ends, at, side="right"))
            first = at - (int(self.ends[shard - 1]) if shard else 0)
            piece = self.shards[shard][first:first + count - filled]
            out[filled:filled + len(piece)] = piece
            filled += len(piece)
        return out


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_tokens: int, n_windows: int) -> tuple[int, np.ndarray]:
    """(offset of the ring, order of its windows); eight bytes a window."""
    random = np.random.default_rng((seed, epoch))
    return int(random.integers(n_tokens)), random.permutation(n_windows)


def windows_per_epoch(tokens: Tokens, seq_len: int) -> int:
    return max(1, len(tokens) // seq_len)


def train_batch(tokens: Tokens, seq_len: int, seed: int, first: int, count: int, mask: bool) -> Batch:
    """Windows first .. first + count of the endless order, on the CPU."""
    n = windows_per_epoch(tokens, seq_len)
    rows = []
    for index in range(first, first + count):
        offset, order = epoch_order(seed, index // n, len(tokens), n)
        rows.append(tokens.read(offset + int(order[index % n]) * seq_len, seq_len + 1))
    return batch_of(np.stack(rows), tokens.eot, mask)


class Feed:
    """feed(first, count): train_batch on the device. On a GPU it is copied from pinned memory on a stream of its own,
    beside the work that was given to the GPU before."""

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, mask: bool, device: torch.device) -> None:
        self.order, self.mask, self.device = (tokens, seq_len, seed), mask, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, first: int, count: int) -> Batch:
        batch = train_batch(*self.order, first, count, self.mask)
        if self.stream is None:
            return Batch(*(None if x is None else x.to(self.device) for x in batch))    # type: ignore[arg-type]
        with torch.cuda.stream(self.stream):
            batch = Batch(*(None if x is None else x.pin_memory().to(self.device, non_blocking=True)
                            for x in batch))    # type: ignore[arg-type]
        user = torch.cuda.current_stream(self.device)
        user.wait_stream(self.stream)
        for x in batch:
            if x is not None:
                x.record_stream(user)       # its memory is not given away before the steps have read it
        return batch


def needs_mask(tokens: Tokens, seq_len: int) -> bool:
    """Whether training windows hold parts of several documents, or, when the text is shorter, copies of the one."""
    return tokens.documents > 1 or len(tokens) <= seq_len


def valid_batches(tokens: Tokens, seq_len: int, count: int) -> Iterator[Batch]:
    """The whole part once, windows side by side, each token counted once; an end-of-text goes before the first."""
    n = -(-len(tokens) // seq_len)
    for first in range(0, n, count):
        rows = np.full((count, seq_len + 1), -1, np.int64)
        for row, window in enumerate(range(first, min(first + count, n))):
            here = min(seq_len, len(tokens) - window * seq_len)
            # the ring's last token is an end-of-text: it stands before the first, as before every document
            rows[row, :here + 1] = tokens.read(window * seq_len - 1, here + 1)
        yield batch_of(rows, tokens.eot, tokens.documents > 1)


def batch_of(rows: np.ndarray, eot: int, mask: bool) -> Batch:
    """(B, T + 1) tokens, -1 where none is, as a Batch. An end-of-text is the first token its document sees."""
    inputs, targets = np.where(rows[:, :-1] < 0, eot, rows[:, :-1]), rows[:, 1:]
    starts = None
    if mask:
        position = np.arange(inputs.shape[1], dtype=np.int32)
        starts = torch.from_numpy(np.maximum.accumulate(np.where(inputs == eot, position, 0), axis=1))
    return Batch(torch.from_numpy(inputs), torch.from_numpy(np.ascontiguousarray(targets)), starts)
