"""python tests/fuzz.py [MUTATIONS [SEED]]: every file format that Forge reads, with bytes changed, cut and doubled and
values swapped. A file is read, or refused with RequestError or Failure; nothing else may be raised, no reading may last, no
memory be filled."""

from __future__ import annotations

import base64
import bz2
import gzip
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forge import checkpoint, tasks
from forge.config import Config, DataConfig, Failure, RequestError, load_json, load_toml, save_json
from forge.data import prepare, sources
from forge.data.loader import Tokens
from forge.memory import Memory, memory_path
from forge.metrics import cut
from forge.tokenizer import Tokenizer, train_bpe
from forge.training import Progress
from forge.view.report import read_metrics

SECONDS = 5         # for one reading
MEGABYTES = 1500    # more than at the beginning
NUMBERS = (b"0", b"-1", b"1e999", b"NaN", b"9" * 30, b"null", b"true", b'""', b"[]", b"{}", b"1.5", b'"../../etc/passwd"')


def mutated(raw: bytes, random_: random.Random) -> bytes:
    """One to four changes, such as disks, editors and people with ideas make."""
    out = bytearray(raw)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(out) + 1)
        kind = random_.randrange(8)
        if kind == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << random_.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at:at + random_.randint(1, 40)]
        elif kind == 3:
            out[at:at] = random_.randbytes(random_.randint(1, 40))
        elif kind == 4:
            out[at:at] = out[at:at + random_.randint(1, 400)]
        elif kind == 5:
            out[at:at] = random_.choice((b"[" * 3000, b'{"a":' * 3000, b"\0" * 50, b"\xff" * 8, b'"', b"\n", b","))
        else:       # a value of JSON by another
            places = [i for i, byte in enumerate(out) if byte in b":,["]
            if places:
                begin = random_.choice(places) + 1
                end = next((i for i in range(begin, len(out)) if out[i] in b",]}\n"), len(out))
                out[begin:end] = random_.choice(NUMBERS)
    return bytes(out)


def formats(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """{name: (a good file, what reads it)}."""
    text = "the forge is hot and the iron is red so we strike while it glows\n" * 40
    found: dict[str, tuple[Path, Callable[[], Any]]] = {}

    def add(name: str, raw: bytes, read: Callable[[Path], Any]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        found[name] = path, lambda: read(path)

    def documents(path: Path) -> None:
        for skip in (False, True):
            config = DataConfig(text=(str(path),), skip_bad_lines=skip)
            for _ in sources.read(sources.find(config.text, Counter()), config, Counter()):
                pass

    lines = "".join(json.dumps({"text": f"{text[i:i + 90]} é"}) + "\n" for i in range(30)).encode()
    add("a.txt", text.encode(), documents)
    add("b.txt", ("\ufeff" + text).encode("utf-16-le"), documents)
    add("c.jsonl", lines, documents)
    add("d.jsonl.gz", gzip.compress(lines), documents)
    add("e.txt.bz2", bz2.compress(text.encode()), documents)

    def tokenize(path: Path) -> None:
        tokenizer = Tokenizer.load(path)
        tokenizer.decode(tokenizer.encode("the forge glows").tolist())

    bpe = train_bpe([text], len(text), 280)
    add("tokenizer.json", bpe.json.encode(), tokenize)
    ranks = enumerate([bytes([b]) for b in range(256)] + [b"th", b"the"])
    add("x.tiktoken", b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in ranks), tokenize)
    vocab = json.loads(bpe.json)["model"]["vocab"]
    merges = [" ".join(pair) for pair in json.loads(bpe.json)["model"]["merges"]]
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    add("gpt2/vocab.json", json.dumps(vocab).encode(), tokenize)

    save_json(Config(), folder / "config.json")
    add("config.json", (folder / "config.json").read_bytes(), load_json)
    add("config.toml", b"seed = 3\n[model]\ndim = 96\n[train]\nminutes = 3.5\n", lambda path: load_toml(Config(), str(path)))

    data = folder / "data"
    prepare.prepare(DataConfig(text=(str(folder / "a.txt"),), tokenizer="bytes"), data, say=lambda _: None)
    tokens_hash = Tokenizer.load(data / "tokenizer.json").hash

    def tokens(_: Path) -> None:
        found = Tokens(data / "train", tokens_hash)
        found.read(len(found) - 3, 10)

    for file in ("index.json", "shard_00000.bin"):
        add(f"data/train/{file}", (data / "train" / file).read_bytes(), tokens)

    run = folder / "run"
    w = torch.randn(9, 3)
    checkpoint.save(run, 7, {"w": w}, {"w/m": w}, Progress(7, 1.5, 2.0, 3)._asdict(), 2, True)
    place = checkpoint.folder(run, 7)

    def whole(path: Path) -> None:
        """Who alters a file on purpose alters the manifest, too."""
        manifest = json.loads((place / "MANIFEST.json").read_bytes())
        good = (place / "MANIFEST.json").read_bytes()
        manifest[path.name] = {"bytes": path.stat().st_size, "sha256": checkpoint.sha256(path)}
        (place / "MANIFEST.json").write_text(json.dumps(manifest))
        try:
            Progress.of_state(checkpoint.load(run).state)
        finally:
            (place / "MANIFEST.json").write_bytes(good)

    for file in checkpoint.FILES:
        add(f"run/checkpoints/step_000007/{file}", (place / file).read_bytes(), whole)
    add("run/checkpoints/step_000007/MANIFEST.json", (place / "MANIFEST.json").read_bytes(), lambda _: checkpoint.load(run))
    add("run/latest", (run / "latest").read_bytes(), lambda _: checkpoint.load(run))

    def metrics(path: Path) -> None:
        try:
            read_metrics(path)
        finally:
            cut(path, 2)

    record = {"tokens": 9, "loss": 3.1, "step_ms": 2.0, "val_loss": 3.0, "val_bpb": 1.2, "sample": "ab"}
    add("metrics.jsonl", b"".join(json.dumps({"step": i, **record}).encode() + b"\n" for i in range(1, 9)), metrics)
    Memory("here")("what", lambda: 1.5)
    add(str(memory_path().relative_to(folder)), memory_path().read_bytes(), lambda _: Memory("here")("what", lambda: 2.5))
    item = {"sentence_good": "It glows.", "sentence_bad": "It glow.", "field": "syntax", "UID": "x", "linguistics_term": "y"}
    add("blimp.jsonl", (json.dumps(item) + "\n").encode() * 5, lambda path: tasks.read(path, tasks.TASKS["blimp"][1]))
    return found


def fuzz(count: int, seed: int, folder: Path) -> list[str]:
    """The faults that were found in so many mutations, spread over all formats."""
    random_, faults = random.Random(seed), []
    all_formats = formats(folder)
    for name, (path, read) in all_formats.items():
        read()              # the good file is read
        good = path.read_bytes()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(-(-count // len(all_formats))):
            raw = mutated(good, random_)
            path.write_bytes(raw)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                read()
            except (RequestError, Failure):
                pass
            except BaseException:
                kept = Path(tempfile.gettempdir()) / f"fuzz-{os.path.basename(name)}-{seed}-{i}"
                kept.write_bytes(raw)
                faults.append(f"{name}, mutation {i}, kept as {kept}: {traceback.format_exc(limit=-3)}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if (grown := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > MEGABYTES * 1024:
                faults.append(f"{name}, mutation {i}: memory grew by {grown >> 10} MB")
                break
        path.write_bytes(good)
    return faults


class TooLong(BaseException):
    """A reading lasted longer than SECONDS."""


def too_long(*_: object) -> None:
    raise TooLong


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_long)
    scratch = Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    try:
        found = fuzz(wanted, int(sys.argv[2]) if len(sys.argv) > 2 else 0, scratch)
    finally:
        shutil.rmtree(scratch)
    print("\n".join(found[:200]))
    print(f"{wanted:,} mutations, {len(found)} faults")
    sys.exit(bool(found))
