"""Seconds to train a tokenizer, encoding beside tiktoken in turns, and seconds for 5,000 BLiMP pairs, on this CPU.

    python benchmarks/tokenizers_and_tasks.py NOVELS BLIMP_DIR [ROUNDS]

NOVELS: a folder of .jsonl text files; BLIMP_DIR: a folder with blimp.jsonl (or .gz, .bz2). The ids are compared with
tiktoken's own gpt2, which reads its two files from its cache. Writes benchmarks/results/tokenizers_and_tasks.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import tiktoken
import torch

from forge import tokenizer as tokenizers
from forge.config import DataConfig
from forge.data import sources
from forge.machine import environment, settle_cpu
from forge.model.transformer import Transformer, init_weights
from forge.presets import preset
from forge.tasks import run_tasks
from forge.tokenizer import Tokenizer


def tiktokens_gpt2() -> tiktoken.Encoding:
    """tiktoken's own; its cache is filled with GPT-2's files, whose hashes it checks."""
    folder = Path(tempfile.mkdtemp())
    for name in ("vocab.bpe", "encoder.json"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(tokenizers.GPT2_FILES / name, folder / hashlib.sha1(url.encode()).hexdigest())
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return tiktoken.get_encoding("gpt2")


def main(novels: str, blimp: str, rounds: int) -> None:
    settle_cpu()
    found = sources.find((novels,), Counter())
    texts, whole = [], ""
    for piece in sources.read(found, DataConfig(), Counter()):
        whole += piece.text
        if piece.ends:
            texts.append(whole)
            whole = ""
    n_bytes = sum(len(text.encode()) for text in texts)
    began = time.perf_counter()
    own = tokenizers.train_bpe(texts, n_bytes, 32_768)
    training_s = time.perf_counter() - began
    gpt2, theirs = Tokenizer.load("gpt2"), tiktokens_gpt2()
    pieces = list(tokenizers.stretches(texts, 1 << 16))
    threads = os.cpu_count() or 1
    speeds: dict[str, list[float]] = {"tiktoken gpt2": [], "forge gpt2": [], "forge, the one trained here": []}
    for _ in range(rounds):
        for name, encode in zip(speeds, (lambda: theirs.encode_ordinary_batch(pieces, num_threads=threads),
                                         lambda: list(gpt2.encode_all(pieces)), lambda: list(own.encode_all(pieces)))):
            began = time.perf_counter()
            encode()
            speeds[name].append(n_bytes / 1e6 / (time.perf_counter() - began))
    equal = all(theirs.encode_ordinary(text) == gpt2.encode(text).tolist() for text in texts)
    print(f"{len(texts)} documents, {n_bytes:,} bytes; trained to {own.vocab_size:,} tokens in {training_s:.1f} s; gpt2's "
          f"ids {'equal' if equal else 'NOT equal'} tiktoken's on every document")
    for name, mb_per_s in speeds.items():
        print(f"{name:28} {statistics.median(mb_per_s):.1f} MB/s ({min(mb_per_s):.1f} to {max(mb_per_s):.1f})")

    model = Transformer(replace(preset("gpt-10m").model, vocab_size=own.vocab_size).resolve()).eval()
    init_weights(model, 0)
    result = run_tasks(model, own, ["blimp"], blimp, limit=5000)["blimp"]
    (Path(__file__).parent / "results" / "tokenizers_and_tasks.json").write_text(json.dumps(
        {"bytes": n_bytes, "training_s": training_s, "encoding_mb_per_s": speeds, "gpt2_ids_equal": equal,
         "blimp_5000": result.numbers(), "environment": environment(torch.device("cpu"))}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 5)
