"""Tokenizers: characters, bytes, and byte-level BPE, all kept as the standard tokenizer.json of `tokenizers`.

One end-of-text token parts documents. It is never found in text: a document that spells it out is encoded as text.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from forge.config import Failure, RequestError

EOT = "<|endoftext|>"
KINDS = ("chars", "bytes", "bpe")
TRAINING_BYTES = 64 << 20       # a BPE is trained on at most this much text, spread evenly over it
PIECE = 1 << 20                 # characters encoded at once
CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")


class Tokenizer:
    """Text to token ids and back.

    hash is the sha256 of its tokenizer.json, which data and runs carry; eot is the end-of-text id.
    """

    def __init__(self, json: str) -> None:
        self.json = json
        self.hash = hashlib.sha256(json.encode()).hexdigest()
        try:
            self.library = Library.from_str(json)
        except Exception as error:      # the library raises bare Exception, naming the JSON's fault
            raise RequestError(f"this is no tokenizer.json: {error}") from error
        self.library.encode_special_tokens = True
        eot = self.library.token_to_id(EOT)
        if eot is None:
            raise RequestError(f"the tokenizer has no {EOT} token, which parts documents; add it as a special token")
        self.eot: int = eot
        vocab = self.library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        byte_level = isinstance(self.library.decoder, decoders.ByteLevel)
        self.bytes_of: list[bytes] = [b""] * self.vocab_size
        for token, index in vocab.items():
            self.bytes_of[index] = bytes(ALPHABET[c] for c in token) if byte_level and token != EOT else token.encode()
        # characters and bytes are looked up in a table: the library takes seconds for a megabyte of one-symbol tokens
        single = len(self.library.get_vocab(with_added_tokens=False)) == self.vocab_size - 1
        self.kind = "bpe"
        if byte_level and single and self.vocab_size == 257:
            self.kind = "bytes"
            self.table = np.zeros(256, np.int64)
            for index, token_bytes in enumerate(self.bytes_of):
                if len(token_bytes) == 1:
                    self.table[token_bytes[0]] = index
        elif not byte_level and single and all(len(t) == 1 for t in vocab if t != EOT):
            self.kind = "chars"
            self.table = np.full(0x110000, -1, np.int64)
            for token, index in vocab.items():
                if token != EOT:
                    self.table[ord(token)] = index

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except RequestError as error:
            raise RequestError(f"tokenizer {path}: {error}; name chars, bytes, bpe or a tokenizer.json") from error
        except OSError as error:
            raise RequestError(f"tokenizer {path}: {error.strerror}; name chars, bytes, bpe or a "
                               "tokenizer.json") from error
        except UnicodeDecodeError as error:
            raise Failure(f"tokenizer {path} is damaged: {error}") from error

    def save(self, path: Path) -> None:
        path.write_text(self.json, encoding="utf-8")

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, (n,) int64. Raises RequestError for a character that a chars tokenizer does not have."""
        return next(self.encode_all([text]))

    def encode_all(self, texts: list[str]) -> Iterator[np.ndarray]:
        """The ids of each text; a BPE takes them side by side on all cores."""
        if self.kind == "bpe":
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
        return b"".join(self.bytes_of[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come, never half a character."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            yield decoder.decode(self.bytes_of[i])
        yield decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: printable ones stand for themselves (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


ALPHABET = byte_alphabet()


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


def bpe_vocab(n_bytes: int) -> int:
    """The vocabulary of a BPE for this much text: the power of two next to the square root of its bytes."""
    return min(max(1 << round(math.log2(max(n_bytes, 1)) / 2), 512), 32_768)


def train_bpe(texts: Iterable[str], n_bytes: int, vocab_size: int) -> Tokenizer:
    """Byte-level BPE over a text of n_bytes, split into words as GPT-2 does.

    At most TRAINING_BYTES are read by the trainer, in stretches spread evenly. Fewer than vocab_size tokens come out
    when the text has no more pairs that occur twice.
    """
    if vocab_size < 257:
        raise RequestError(f"a bpe of {vocab_size} tokens cannot hold the 256 bytes and {EOT}; "
                           "set --data.bpe-vocab to 257 or more, or --data.tokenizer bytes")
    every = max(1, math.ceil(n_bytes / TRAINING_BYTES))
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
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
