"""Tokenizers: characters, bytes, and byte-level BPE, all kept as the standard tokenizer.json of `tokenizers`.

One end-of-text token parts documents. Special tokens are not found in text, unless asked for: a document that spells
one out is encoded as text.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from tokenizers.decoders import DecodeStream

from forge.config import Failure, Interrupted, RequestError, parse_json

EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")     # what other tokenizers call it
KINDS = ("chars", "bytes", "bpe")       # what is made from a text
GPT2_FILES = Path(__file__).parent / "gpt2"
# how a text is split into words before pairs are merged: GPT-2's way, and GPT-4's (cl100k_base) and GPT-4o's (o200k_base)
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
              r"|\s+(?!\S)|\s+")
GPT4O_SPLIT = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
               r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
               r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# tiktoken's files hold ranks alone: the split and the end-of-text id of those that are known, by their number of ranks
TIKTOKEN_FILES = {50_256: (GPT2_SPLIT, 50_256), 50_280: (GPT2_SPLIT, 50_256), 100_256: (GPT4_SPLIT, 100_257),
                  199_998: (GPT4O_SPLIT, 199_999)}
TRAINING_BYTES = 64 << 20       # a BPE is trained on at most this much text, spread evenly over it
PIECE = 1 << 20                 # characters encoded at once
CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")


class Tokenizer:
    """Text to token ids and back.

    hash is the sha256 of its tokenizer.json, which data and runs carry; eot is the end-of-text id; specials maps each
    special token to its id.
    """

    def __init__(self, text: str) -> None:
        try:
            self.library = Library.from_str(text)
        except Exception as error:      # the library raises bare Exception, naming the JSON's fault
            raise RequestError(f"this is no tokenizer.json: {error}") from error
        eot = next((name for name in EOT_NAMES if self.library.token_to_id(name) is not None), EOT)
        if self.library.token_to_id(eot) is None:
            self.library.add_special_tokens([EOT])
            text = self.library.to_str()
        self.json = text
        self.hash = hashlib.sha256(text.encode()).hexdigest()
        self.library.encode_special_tokens = True
        self.eot = self.library.get_vocab(with_added_tokens=True)[eot]
        added = self.library.get_added_tokens_decoder()
        self.specials = {t.content: i for i, t in added.items() if t.special} | {eot: self.eot}
        vocab = self.library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.bytes_of = byte_table(self.library, vocab, {t.content for t in added.values()} | {eot}, self.vocab_size)
        self.kind, self.table, self.fast = "bpe", np.zeros(0, np.int64), None
        # characters and bytes are looked up in a table: the library takes seconds for a megabyte of one-symbol tokens
        if self.bytes_of and len(vocab) == 257 and all(len(b) == 1 for i, b in enumerate(self.bytes_of) if i != self.eot):
            self.kind, self.table = "bytes", np.zeros(256, np.int64)
            for i, b in enumerate(self.bytes_of):
                if i != self.eot:
                    self.table[b[0]] = i
        elif isinstance(self.library.decoder, decoders.Fuse) and all(len(token) == 1 for token in vocab if token != EOT):
            self.kind, self.table = "chars", np.full(0x110000, -1, np.int64)
            for token, i in vocab.items():
                if token != EOT:
                    self.table[ord(token)] = i
        elif self.bytes_of:
            self.fast = as_tiktoken(json.loads(text), self.bytes_of)
        self.cuttable = self.kind != "bpe" or self.fast is not None     # whether `stretches` may part a text

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From the name gpt2, a tokenizer.json, GPT-2's two files (either, or their folder), or a .tiktoken file.

        Raises RequestError when there is none; Failure for a damaged one.
        """
        place = GPT2_FILES if path == "gpt2" and not Path(path).exists() else Path(path)
        advice = ("name gpt2, a tokenizer.json, a folder with GPT-2's two files, or a .tiktoken file (and in training also "
                  "chars, bytes or bpe, which are made from the text)")
        try:
            if place.is_dir():
                if (place / "tokenizer.json").is_file():
                    return cls((place / "tokenizer.json").read_text(encoding="utf-8"))
                return from_gpt2(place)
            if place.suffix == ".tiktoken":
                return from_tiktoken(place)
            if place.name in ("encoder.json", "vocab.bpe", "vocab.json", "merges.txt"):
                return from_gpt2(place.parent)
            return cls(place.read_text(encoding="utf-8"))
        except RequestError as error:
            raise RequestError(f"tokenizer {path}: {error}; {advice}") from error
        except OSError as error:
            raise RequestError(f"tokenizer {path}: {error.strerror}; {advice}") from error
        except (Failure, Interrupted):
            raise
        except Exception as error:      # whatever its parts make of it; the library raises plain Exceptions
            raise Failure(f"tokenizer {path} is damaged: {error}") from error

    def save(self, path: Path) -> None:
        path.write_text(self.json, encoding="utf-8")

    def encode(self, text: str, specials: bool = False) -> np.ndarray:
        """The ids of a text, (n,) int64. specials: special tokens that the text spells out become those tokens.

        Raises RequestError for a character that a chars tokenizer does not have, and for half a surrogate pair.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"{text[max(0, error.start - 10):error.end + 10]!r} holds what is no character: type it in "
                               "UTF-8") from error
        if not specials:
            return next(self.encode_all([text]))
        parts = re.split("(" + "|".join(map(re.escape, sorted(self.specials, key=len, reverse=True))) + ")", text)
        return np.concatenate([np.array([self.specials[part]]) if i % 2 else self.encode(part)
                               for i, part in enumerate(parts)])

    def encode_all(self, texts: list[str]) -> Iterator[np.ndarray]:
        """The ids of each text; a BPE takes them side by side on all cores."""
        if self.fast and len(texts) == 1:
            yield np.array(self.fast.encode_ordinary(texts[0]), np.int64)
        elif self.fast:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                yield from (np.array(ids, np.int64) for ids in pool.map(self.fast.encode_ordinary, texts))
        elif self.kind == "bpe":
            for encoding in self.library.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)
        elif self.kind == "bytes":
            for text in texts:
                yield self.table[np.frombuffer(text.encode(), np.uint8)]
        else:
            for text in texts:
                ids = self.table[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
                if ids.size and ids.min() < 0:
                    at = int(np.argmin(ids))
                    raise RequestError(
                        f"character {text[at]!r} (U+{ord(text[at]):04X}) is not among the {self.vocab_size - 1} that "
                        "this tokenizer knows; leave it out, or train with --data.tokenizer bytes")
                yield ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        if self.bytes_of is None:
            return self.library.decode(list(ids), skip_special_tokens=False)
        return b"".join(self.bytes_of[i] for i in ids).decode("utf-8", errors="replace")

    def decoder(self) -> Callable[[int | None], str]:
        """A function from the next id to the text that is now sure, never half a character; from None to what is left."""
        if self.bytes_of is None:
            pieces = DecodeStream(skip_special_tokens=False)
            return lambda i: "" if i is None else pieces.step(self.library, i) or ""
        table, text = self.bytes_of, codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda i: text.decode(b"", final=True) if i is None else text.decode(table[i])

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come."""
        decoder = self.decoder()
        yield from (decoder(i) for i in (*ids, None))


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: printable ones stand for themselves (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


ALPHABET = byte_alphabet()
CHARACTER = {b: c for c, b in ALPHABET.items()}


def byte_table(library: Library, vocab: dict[str, int], added: set[str], size: int) -> list[bytes] | None:
    """The bytes of each id; None where a token's text depends on its neighbours, as in SentencePiece and WordPiece."""
    byte_level = isinstance(library.decoder, decoders.ByteLevel)
    if not (byte_level or isinstance(library.decoder, decoders.Fuse)):
        return None
    table = [b""] * size
    for token, i in vocab.items():
        literal = not byte_level or token in added
        table[i] = token.encode() if literal else bytes(ALPHABET[c] for c in token)
    return table


def as_tiktoken(spec: dict[str, Any], bytes_of: list[bytes]) -> tiktoken.Encoding | None:
    """The same BPE for tiktoken, which encodes about three times as fast; None where it could differ.

    tiktoken merges the pair whose result has the lowest id, `tokenizers` the pair that stands first in its list: the
    same when every merge makes a token of its own, in the order of the ids, and each byte has a token.
    """
    model, steps = spec["model"], spec.get("pre_tokenizer") or {"type": None}
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    steps = steps.get("pretokenizers", [steps])
    split = [s["pattern"].get("Regex") for s in steps if s["type"] == "Split" and s["behavior"] == "Isolated"
             and not s["invert"]]
    level = steps[-1]
    if (spec.get("normalizer") or model.get("type") != "BPE" or level.get("type") != "ByteLevel"
            or level.get("add_prefix_space", True) or any(model.get(key) for key in others)):
        return None
    whole = level.get("use_regex", True) and len(steps) == 1
    pattern = GPT2_SPLIT if whole else split[0] if split and len(steps) == 2 else None
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    made = [model["vocab"].get(a + b, -1) for a, b in merges]
    single = [i for token, i in model["vocab"].items() if len(token) == 1 and token in ALPHABET]
    learned = len(model["vocab"]) - sum(token in EOT_NAMES for token in model["vocab"])
    if (pattern is None or len(single) != 256 or len(set(made)) + 256 != learned
            or any(a >= b for a, b in itertools.pairwise((max(single), *made)))):
        return None
    return tiktoken.Encoding("forge", pat_str=pattern, mergeable_ranks={bytes_of[i]: i for i in (*single, *made)},
                             special_tokens={})


def chars(characters: Iterable[str]) -> Tokenizer:
    """One token a character, in code point order, and end-of-text last."""
    vocab = {c: i for i, c in enumerate(sorted(set(characters)))}
    library = Library(models.WordLevel(vocab, unk_token=EOT))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    library.add_special_tokens([EOT])
    return Tokenizer(library.to_str())


def byte_tokens() -> Tokenizer:
    """One token a byte, with the byte as its id, and end-of-text = 256."""
    library = Library(models.BPE(vocab=dict(ALPHABET), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([EOT])
    return Tokenizer(library.to_str())


def byte_level_bpe(model: models.BPE, pattern: str) -> Library:
    """The library's tokenizer over bytes, with the text split into words by the pattern."""
    library = Library(model)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == GPT2_SPLIT)
    library.pre_tokenizer = whole if pattern == GPT2_SPLIT else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), whole])
    library.decoder = decoders.ByteLevel()
    return library


def from_gpt2(folder: Path) -> Tokenizer:
    """From GPT-2's encoder.json and vocab.bpe, or the same as vocab.json and merges.txt."""
    for ids, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (folder / ids).is_file() and (folder / merges).is_file():
            vocab = parse_json((folder / ids).read_bytes())
            lines = (folder / merges).read_text(encoding="utf-8").split("\n")
            pairs = [(a, b) for line in lines if line and not line.startswith("#version") for a, b in [line.split(" ")]]
            library = byte_level_bpe(models.BPE(vocab=vocab, merges=pairs), GPT2_SPLIT)
            library.add_special_tokens([EOT])
            return Tokenizer(library.to_str())
    raise RequestError("GPT-2's two files are needed side by side: encoder.json and vocab.bpe, or vocab.json and merges.txt")


def from_tiktoken(path: Path) -> Tokenizer:
    """From tiktoken's file: a line for each token, its bytes in base64 and its rank."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in
             (line.split() for line in path.read_bytes().splitlines() if line)}
    pattern, eot = TIKTOKEN_FILES.get(len(ranks), (GPT4_SPLIT, max(ranks.values()) + 1))
    text = {token: "".join(CHARACTER[b] for b in token) for token in ranks}
    vocab = {text[token]: rank for token, rank in ranks.items()} | {EOT: eot}
    parts = [last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    merges = [(text[left], text[right]) for left, right in parts]
    library = byte_level_bpe(models.BPE(vocab=vocab, merges=merges), pattern)
    library.add_special_tokens([EOT])
    return Tokenizer(library.to_str())


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that a token was merged from: what merging by lower ranks alone leaves of it."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        rank, i = min((ranks.get(a + b, 1 << 60), i) for i, (a, b) in enumerate(itertools.pairwise(parts)))
        if rank >= ranks[token]:
            raise ValueError(f"token {token!r} is not two tokens of lower rank")
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def bpe_vocab(n_bytes: int) -> int:
    """The vocabulary of a BPE for this much text: the power of two next to the square root of its bytes."""
    return min(max(1 << round(math.log2(max(n_bytes, 1)) / 2), 512), 32_768)


def train_bpe(texts: Iterable[str], n_bytes: int, vocab_size: int) -> Tokenizer:
    """Byte-level BPE over a text of n_bytes, split into words as GPT-4 does.

    At most TRAINING_BYTES are read by the trainer, in stretches spread evenly. Fewer than vocab_size tokens come out
    when the text has no more pairs that occur twice.
    """
    if vocab_size < 257:
        raise RequestError(f"a bpe of {vocab_size} tokens cannot hold the 256 bytes and {EOT}; ask for 257 or more, or "
                           "take the tokenizer bytes")
    every = max(1, math.ceil(n_bytes / TRAINING_BYTES))
    library = byte_level_bpe(models.BPE(), GPT4_SPLIT)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, min_frequency=2, show_progress=False,
                                  initial_alphabet=list(ALPHABET), special_tokens=[])
    library.train_from_iterator(itertools.islice(stretches(texts, 1 << 16), 0, None, every), trainer)
    library.add_special_tokens([EOT])
    return Tokenizer(library.to_str())


def stretches(texts: Iterable[str], size: int) -> Iterator[str]:
    """The same text in pieces of about size characters, cut where no word tokenizer joins: before a space that parts
    two letters. Encoding the pieces one by one gives the ids of the whole; a text without such a place stays whole.
    """
    for text in texts:
        start = 0
        while start < len(text):
            cut = CUT.search(text, start + size)
            end = cut.end() if cut else len(text)
            yield text[start:end]
            start = end


class Comparison(NamedTuple):
    """A tokenizer over a text."""

    name: str
    vocab_size: int
    bytes_per_token: float
    mb_per_s: float         # encoding, on all cores
    round_trip: bool        # whether decoding gives the text back


def compare(names: Sequence[str], texts: Sequence[str]) -> Iterator[Comparison]:
    """How each tokenizer (bytes, or what Tokenizer.load takes) does on the texts, which are held in memory."""
    n_bytes = sum(len(text.encode("utf-8")) for text in texts)
    for name in names:
        tokenizer = byte_tokens() if name == "bytes" else Tokenizer.load(name)
        pieces = list(stretches(texts, PIECE >> 4)) if tokenizer.cuttable else list(texts)
        began = time.perf_counter()
        ids = list(tokenizer.encode_all(pieces))
        seconds = time.perf_counter() - began
        whole = all(tokenizer.decode(i.tolist()) == piece for i, piece in zip(ids, pieces))
        yield Comparison(name, tokenizer.vocab_size, n_bytes / max(1, sum(map(len, ids))), n_bytes / 1e6 / seconds, whole)
