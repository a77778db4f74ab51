"""The command line: a verb, its typed arguments, one call. A verb is imported when it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

import forge
from forge.config import Config, DataConfig, Failure, Interrupted, RequestError, load_json, load_toml, nearest
from forge.presets import PRESETS, preset

HELP = """usage: forge VERB ...

Forge trains language models from scratch: raw text in, a model that writes out.

  forge train [TEXT ...]            trains on files and folders of text; no argument: a small model of Shakespeare
  forge train --resume RUN          goes on with a run where it stopped
  forge sample RUN                  writes with a trained model
  forge chat RUN                    writes on after each line that you type
  forge eval RUN [TEXT ...]         loss and bits per byte, on the run's validation text or another
  forge eval RUN --tasks blimp,piqa --tasks-dir DIR     accuracy on tasks whose files lie in DIR
  forge report RUN                  one HTML page: curves, samples, settings

  forge tokenizer train TEXT ... --out FILE     makes a tokenizer.json from text
  forge tokenizer compare TEXT ...  how tokenizers do on a text
  forge data prepare TEXT ... --out DIR     turns text into token shards, to train on many times
  forge data info DIR               says what is in such a folder

  forge doctor                      what this machine has, and what that means for training
  forge bench train|generate        how fast it trains and writes
  forge bench attention             its attention beside the others that are installed

`forge VERB --help` tells a verb's arguments. Every setting of training is a flag, such as --model.dim or
--train.minutes. --debug shows the whole traceback of an error. It exits with 0 when done, 1 when something failed,
2 when the request was wrong. Presets: """ + ", ".join(PRESETS)

Text = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class TrainCommand:
    """Trains a model on text and makes a run folder: weights, tokenizer, metrics, config.

    Settings come from the preset, then the config file, then the flags below (shown with the preset's values).
    """

    config: str | None = None
    """a TOML file of settings, such as [train] minutes = 30"""
    run: str | None = None
    """the folder to make; None: runs/PRESET-N"""
    resume: str | None = None
    """a run to go on with; its budget, its intervals, what is kept and how the batch is cut may be changed with it"""
    yes: bool = False
    """with --resume: make the changes that the flags ask for, unasked"""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Writing:
    """How a model writes; Sampling in generate.py says the order."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    """below 1 likelier, above 1 wilder; 0 always takes the likeliest token"""
    top_k: int = 0
    """take only from the k likeliest tokens; 0: from all"""
    top_p: float = 1.0
    """take only from the likeliest tokens that together have this probability; 1: from all"""
    min_p: float = 0.0
    """take only from tokens at least this part as likely as the likeliest; 0: from all"""
    repetition_penalty: float = 1.0
    """above 1: tokens that are in the text already become less likely"""
    logit_bias: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ID=BIAS")] = ()
    """added to the logits of token ids, such as 198=-100 or 198=-inf"""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT")] = ()
    """the text ends before any of these; \\n is a line end"""
    specials: bool = False
    """special tokens that the prompt spells out, such as <|endoftext|>, become those tokens; otherwise they are text"""
    seed: int = 1
    """one seed gives one text, whatever else is written beside it"""
    checkpoint: str = "best"
    """best, latest, or a step"""
    device: str = "auto"
    """auto, cuda, mps or cpu"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the computation; auto: as the run was trained"""


@dataclass(frozen=True)
class SampleCommand:
    """Writes with a trained model, token by token."""

    run: Run
    """a run folder"""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT")] = ("",)
    """what the text begins with, or several, written side by side; empty: a new document. Of one that is longer than
    the model's context, the model sees the end"""
    n: int = 1
    """texts for each prompt; they have the seeds seed, seed + 1, ..."""
    logprobs: bool = False
    """also each token's log-probability, in nats"""
    json: bool = False
    """a JSON object for each text, one a line: prompt, seed, text, ids, logprobs, finish"""
    writing: Annotated[Writing, tyro.conf.arg(name="")] = field(default_factory=Writing)


@dataclass(frozen=True)
class ChatCommand:
    """Writes on after each line that you type; all that was said stays before the model, as far as its context goes.

    An empty line lets it go on, /reset forgets, Ctrl-C breaks a text off (at the prompt it ends), Ctrl-D or
    /quit ends.
    """

    run: Run
    """a run folder"""
    writing: Annotated[Writing, tyro.conf.arg(name="")] = field(default_factory=Writing)


@dataclass(frozen=True)
class EvalCommand:
    """Loss (nats per token) and bits per byte of a checkpoint over every token of a text, and accuracy on tasks.

    Accuracy: how often the right choice has the largest log-likelihood; "by byte": log-likelihood over the choice's
    bytes. The result is printed and kept in the run folder, as eval-CHECKPOINT.json.
    """

    run: Run
    """a run folder"""
    text: Text = ()
    """files and folders of text; none: the run's own validation text, unless tasks are named"""
    tasks: Annotated[str, tyro.conf.arg(metavar="NAME,...")] = ""
    """blimp, lambada, hellaswag, arc_easy, arc_challenge, piqa, openbook_qa, copa, winogrande, winograd_wsc"""
    tasks_dir: Annotated[str, tyro.conf.arg(metavar="DIR")] = "."
    """the folder that holds their files, such as blimp.jsonl or piqa.jsonl.gz"""
    limit: int | None = None
    """score so many items of each task, spread over its file"""
    skip_bad_lines: bool = False
    """leave out .jsonl lines that hold no text"""
    checkpoint: str = "best"
    """best, latest, or a step"""
    device: str = "auto"
    """auto, cuda, mps or cpu"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the computation; auto: as the run was trained"""
    text_field: str = "text"
    """the field of a .jsonl record that holds the text"""


@dataclass(frozen=True)
class ReportCommand:
    """Writes one HTML page about a run, which needs no network: curves, evaluations, samples, settings, machine."""

    run: Run
    """a run folder, finished or not"""
    out: str | None = None
    """the file to write; None: RUN/report.html"""


@dataclass(frozen=True)
class TokenizerTrainCommand:
    """Trains a byte-level BPE on text, split into words as GPT-4's is, and writes it as a tokenizer.json.

    Of more than 64 MB of text it reads stretches spread evenly, so that memory stays bounded.
    """

    text: Text
    """files and folders of text"""
    out: str
    """the file to write"""
    vocab_size: int = 0
    """tokens, the 256 bytes and end-of-text included; 0: the power of two next to the square root of the text's bytes"""
    text_field: str = "text"
    """the field of a .jsonl record that holds the text"""
    skip_bad_lines: bool = False
    """leave out and count .jsonl lines that hold no text"""


@dataclass(frozen=True)
class TokenizerCompareCommand:
    """Bytes a token, speed, and whether decoding gives the text back, for several tokenizers on a text."""

    text: Text
    """files and folders of text; their first 64 MB are taken"""
    tokenizers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ("bytes", "gpt2")
    """bytes, gpt2, or files: a tokenizer.json, GPT-2's encoder.json, a .tiktoken; or run folders"""
    text_field: str = "text"
    """the field of a .jsonl record that holds the text"""


@dataclass(frozen=True)
class DoctorCommand:
    """What this machine has, by measurement, what it means for training, and what to do about it."""

    device: str = "auto"
    """auto, cuda, mps or cpu"""


@dataclass(frozen=True)
class BenchTrainCommand:
    """Trains some steps just as `forge train` would and says how fast they are; nothing is kept.

    Tokens a second and a step's time are medians of the steps after the first three; the first step's surplus is given as
    the time to compile: little when the compiler's cache, or a trial before the run, has what it needs. Budget and
    intervals of the settings are not looked at.
    """

    bench_steps: int = 20
    """steps to take after the first three"""
    profile: bool = False
    """also where a step's time goes"""
    out: str | None = None
    """a JSON file to write, with the machine's data"""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class BenchGenerateCommand:
    """How fast a model reads a prompt and writes, for several batches and dtypes. The weights are random."""

    preset: str = "gpt2-124m"
    """the shape"""
    prompt_tokens: int = 128
    new_tokens: int = 64
    batches: tuple[int, ...] = (1, 8)
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    device: str = "auto"
    """auto, cuda, mps or cpu"""
    out: str | None = None
    """a JSON file to write, with the machine's data"""


@dataclass(frozen=True)
class BenchAttentionCommand:
    """Each backend of Forge's attention beside each other attention that is installed: causal, forward and backward.

    All take turns on the same inputs. A ratio is the time of the fastest other one over a row's own: above 1 is faster.
    """

    shapes: tuple[str, ...] = ()
    """B,H,K,T,D: sequences, query heads, key-value heads, tokens, head_dim; with ,wW a window of W keys. Such as
    8,12,12,4096,64 1,32,8,16384,128,w1024. Without: some that fit the device"""
    dtype: str = "auto"
    """bfloat16, float16 or float32; auto is bfloat16 on CUDA, float32 elsewhere"""
    device: str = "auto"
    """auto, cuda, mps or cpu"""
    plot: str | None = None
    """an .svg or .png file to draw: time and memory against T"""
    out: str | None = None
    """a JSON file to write, with the machine's data"""


@dataclass(frozen=True)
class PrepareCommand:
    """Turns text into a folder of token shards, split into training and validation, with its tokenizer."""

    text: Text
    """files and folders of text"""
    out: str
    """the folder to make"""
    valid: str | None = None
    """validation text; without it the last tenth of the text"""
    tokenizer: str | None = None
    """chars, bytes, bpe, gpt2, or a file (tokenizer.json, encoder.json, .tiktoken); without it by the amount of text"""
    bpe_vocab: int = 0
    """tokens of a bpe trained here; 0: derived from the amount of text"""
    text_field: str = "text"
    """the field of a .jsonl record that holds the text"""
    skip_bad_lines: bool = False
    """leave out and count .jsonl lines that hold no text"""


@dataclass(frozen=True)
class InfoCommand:
    """Says what is in a folder of token shards."""

    folder: tyro.conf.Positional[str]
    """a folder made by `forge data prepare`, or the data folder of a run"""


if TYPE_CHECKING:
    from forge.generate import Sampling

C = TypeVar("C")


def parse(command: type[C], argv: list[str], prog: str, default: C | None = None) -> C:
    """The arguments of a verb; help ends the process with 0 and what cannot be parsed with 2."""
    if default is None:
        return tyro.cli(command, args=argv, prog=prog)
    return tyro.cli(command, args=argv, prog=prog, default=default)


def option(argv: list[str], name: str) -> str | None:
    """The last value of --name in argv, which decides what the other flags are laid over."""
    value = None
    for i, word in enumerate(argv):
        if word == f"--{name}" and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(f"--{name}="):
            value = word.split("=", 1)[1]
    return value


def train(argv: list[str]) -> None:
    resumed, init, file, named = (option(argv, name) for name in ("resume", "init", "config", "preset"))
    if resumed and (named or file or init or option(argv, "run")):
        raise RequestError("--resume goes on with a run as its config.json says; leave --preset, --config, --init and "
                           "--run out, or begin a new run without --resume")
    if resumed:
        base = run_config(resumed, "--resume")
    else:
        base = preset(named or "shakespeare")
        if init:
            # the model is that run's; what was measured or derived for it is found anew
            theirs = run_config(init, "--init")
            base = theirs if named is None else base
            base = dataclasses.replace(base, init=init, model=theirs.model, data=DataConfig(),
                                       train=preset(base.preset).train)
        if file:
            base = load_toml(base, file)
    command = parse(TrainCommand, argv, "forge train", TrainCommand(settings=base))
    from forge.training import resume, train

    def agree() -> None:
        if command.yes:
            return
        if not sys.stdin.isatty():
            raise RequestError("these changes are made to the run for good; add --yes to make them")
        if input("go on with these changes? [y/N] ").strip().lower() not in ("y", "yes"):
            raise RequestError("nothing was changed")

    if resumed:
        resume(resumed, command.settings, agree=agree)
    else:
        train(command.settings, run=command.run)


def run_config(run: str, flag: str) -> Config:
    if not Path(run).is_dir():
        raise RequestError(f"{flag} {run}: no such run folder; `forge train` makes one and prints its name")
    return load_json(Path(run) / "config.json")


def load(run: str, w: Writing) -> tuple[Any, Any, dict[str, Any]]:
    """(model, tokenizer, the arguments of `write` that all texts share)."""
    sampling = sampling_of(w)
    if w.max_new_tokens < 0:
        raise RequestError(f"--max-new-tokens {w.max_new_tokens}: 0 or more")
    if not 0 <= w.seed < 1 << 62:
        raise RequestError(f"--seed {w.seed}: a number from 0 to {(1 << 62) - 1}")
    import torch

    from forge.generate import load_model

    model, tokenizer = load_model(run, checkpoint=w.checkpoint, device=w.device,
                                  dtype=None if w.dtype == "auto" else getattr(torch, w.dtype))
    stop = [s.replace("\\n", "\n").replace("\\t", "\t") for s in w.stop]
    return model, tokenizer, {"max_new_tokens": w.max_new_tokens, "sampling": sampling, "stop": stop, "specials": w.specials}


def sampling_of(w: Writing) -> Sampling:
    from forge.generate import Sampling

    bias = {}
    for word in w.logit_bias:
        try:
            token, value = word.split("=")
            bias[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {word}: ID=BIAS is needed, such as 198=-100 or 198=-inf") from None
    return Sampling(w.repetition_penalty, bias, w.temperature, w.top_k, w.top_p, w.min_p)


def sample(argv: list[str]) -> None:
    c = parse(SampleCommand, argv, "forge sample")
    if c.n < 1:
        raise RequestError(f"--n {c.n}: at least 1 text for each prompt")
    if not c.prompt:
        raise RequestError('--prompt needs a text; leave it out, or type --prompt "" for a new document')
    model, tokenizer, how = load(c.run, c.writing)
    from forge.generate import Completion, write

    completions = [Completion(prompt, c.writing.seed + i) for prompt in c.prompt for i in range(c.n)]
    for prompt in dict.fromkeys(c.prompt):
        if (n := 1 + len(tokenizer.encode(prompt, c.writing.specials))) > model.config.seq_len:
            print(f"note: the prompt has {n:,} tokens; the model's context holds {model.config.seq_len:,}, and it sees the "
                  "last of them", file=sys.stderr)
    alone = len(completions) == 1 and not c.json
    before = completions[0].prompt
    for _, new in write(model, tokenizer, completions, logprobs=c.logprobs, **how):
        if alone:
            print(before + new, end="", flush=True)
            before = ""
    if alone:
        print(before, end="")
    for completion in completions:
        if c.json:
            print(json.dumps(dataclasses.asdict(completion)))
            continue
        print("" if alone else f"--- seed {completion.seed}\n{completion.prompt}{completion.text}")
        if c.logprobs:
            print("\n".join(f"{logprob:9.4f}  {tokenizer.decode([i])!r}" for i, logprob in
                            zip(completion.ids, completion.logprobs)))


def chat(argv: list[str]) -> None:
    c = parse(ChatCommand, argv, "forge chat")
    model, tokenizer, how = load(c.run, c.writing)
    from forge.generate import ROWS, Completion, write

    if sys.stdin.isatty():
        import readline  # noqa: F401  (input() edits lines and remembers them)
        print(f"{c.run}: type, and it writes on. An empty line lets it go on, /reset forgets, Ctrl-C breaks off, "
              "Ctrl-D ends.")
    history, turn = "", 0
    with model.packed(ROWS):
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                print()
                return
            if line == "/quit":
                return
            if line == "/reset":
                history = ""
                print("(forgotten)", file=sys.stderr)
                continue
            if line.startswith("/") and " " not in line:
                print(f"{line} is no command: /reset forgets, /quit ends", file=sys.stderr)
                continue
            history += line + "\n" if line else ""
            said = Completion(history, c.writing.seed + turn)
            turn += 1
            try:
                for _, new in write(model, tokenizer, [said], **how):
                    print(new, end="", flush=True)
            except Interrupted as stopped:
                if stopped.exit_code != 128 + signal.SIGINT:
                    raise
            print()
            history += said.text + "\n"


def evaluate(argv: list[str]) -> None:
    c = parse(EvalCommand, argv, "forge eval")
    names = [name.strip() for name in c.tasks.split(",") if name.strip()]
    if c.tasks and not names:
        raise RequestError(f"--tasks {c.tasks!r} names no task; type: --tasks blimp,lambada")
    if c.limit is not None and not names:
        raise RequestError(f"--limit {c.limit} is for tasks; name some with --tasks, or leave it out")
    from forge.evaluation import evaluate

    result = evaluate(c.run, c.text, tasks=names, tasks_dir=c.tasks_dir, limit=c.limit, checkpoint=c.checkpoint,
                      device=c.device, dtype=c.dtype, text_field=c.text_field, skip_bad_lines=c.skip_bad_lines)
    if result.loss is not None:
        print(f"{result.loss:.4f} nats per token, {result.bpb:.4f} bits per byte, over {result.tokens:,} tokens of "
              f"{result.bytes:,} bytes")
    print(f"kept in {Path(c.run) / f'eval-{result.checkpoint}.json'}")


def report(argv: list[str]) -> None:
    c = parse(ReportCommand, argv, "forge report")
    usable(c.out)
    from forge.view.report import report

    print(report(c.run, c.out))


def verbs_of(name: str, verbs: dict[str, Callable[[list[str]], None]], argv: list[str], usage: str) -> None:
    """Runs the verb of `forge NAME VERB`, or says which there are."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{usage}\n\n`forge {name} VERB --help` tells the arguments.")
    elif argv[0] not in verbs:
        raise RequestError(f"forge {name} {argv[0]}: there is no such verb; {nearest(argv[0], list(verbs))}")
    else:
        verbs[argv[0]](argv[1:])


def tokenizer(argv: list[str]) -> None:
    verbs_of("tokenizer", {"train": tokenizer_train, "compare": tokenizer_compare}, argv,
             "usage: forge tokenizer train TEXT ... --out FILE [--vocab-size N]\n"
             "       forge tokenizer compare TEXT ... [--tokenizers NAME ...]")


def tokenizer_train(argv: list[str]) -> None:
    c = parse(TokenizerTrainCommand, argv, "forge tokenizer train")
    if not c.text:
        raise RequestError("forge tokenizer train: no text is named; type: forge tokenizer train TEXT ... --out FILE")
    if Path(c.out).exists():
        raise RequestError(f"--out {c.out} exists; name another file, or remove it")
    usable(c.out)
    from forge import tokenizer as tokenizers
    from forge.data import prepare, sources

    config = DataConfig(text=c.text, text_field=c.text_field, skip_bad_lines=c.skip_bad_lines)
    skipped: Counter[str] = Counter()
    found = sources.find(c.text, skipped)
    n_bytes = sum(prepare.measure(found, config, skipped))
    for what, count in skipped.items():
        print(f"data: {count} {what} left out")
    texts = (piece.text for piece in sources.read(found, config, Counter()))
    made = tokenizers.train_bpe(texts, n_bytes, c.vocab_size or tokenizers.bpe_vocab(n_bytes))
    made.save(Path(c.out))
    if made.vocab_size < c.vocab_size:
        print(f"note: the text has no more pairs that come twice, so there are fewer than {c.vocab_size:,} tokens")
    print(f"made {c.out}: {made.vocab_size:,} tokens, from {min(n_bytes, tokenizers.TRAINING_BYTES):,} of {n_bytes:,} bytes;"
          f" train with it by: forge train TEXT ... --data.tokenizer {c.out}")


def tokenizer_compare(argv: list[str]) -> None:
    c = parse(TokenizerCompareCommand, argv, "forge tokenizer compare")
    if not c.text:
        raise RequestError("forge tokenizer compare: no text is named; type: forge tokenizer compare TEXT ...")
    from forge import tokenizer as tokenizers
    from forge.data import sources

    config = DataConfig(text=c.text, text_field=c.text_field)
    skipped: Counter[str] = Counter()
    texts, size = [], 0
    for piece in sources.read(sources.find(c.text, skipped), config, skipped):
        texts.append(piece.text)
        size += len(piece.text)
        if size >= tokenizers.TRAINING_BYTES:
            break
    if not texts:
        raise RequestError(f"{', '.join(c.text)}: no text there; name a file that holds text")
    table("tokenizer", "tokens", "bytes a token", "MB/s", "round trip", rows=(
        (r.name, f"{r.vocab_size:,}", f"{r.bytes_per_token:.3f}", f"{r.mb_per_s:.1f}",
         "whole" if r.round_trip else "NOT whole")
        for r in tokenizers.compare(c.tokenizers, texts)))


def table(*heads: str, rows: Iterable[Iterable[str]]) -> None:
    """Prints columns: the first to the left, the others to the right."""
    from rich.console import Console
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row)
    console = Console()
    console.print(made, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def doctor(argv: list[str]) -> None:
    c = parse(DoctorCommand, argv, "forge doctor")
    from forge.doctor import doctor

    for line in doctor(c.device):
        print(line, flush=True)


def bench(argv: list[str]) -> None:
    verbs_of("bench", {"train": bench_train, "generate": bench_generate, "attention": bench_attention}, argv,
             "usage: forge bench train [--preset NAME] [settings of forge train] [--profile] [--out FILE]\n"
             "       forge bench generate [--preset NAME] [--out FILE]\n"
             "       forge bench attention [--shapes B,H,K,T,D ...] [--dtype DTYPE] [--plot FILE] [--out FILE]")


def bench_train(argv: list[str]) -> None:
    c = parse(BenchTrainCommand, argv, "forge bench train",
              BenchTrainCommand(settings=preset(option(argv, "preset") or "shakespeare")))
    if c.bench_steps < 1:
        raise RequestError(f"--bench-steps {c.bench_steps}: at least 1")
    usable(c.out)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")      # read when torch loads: silences the profiler, whose last level is 5
    from forge.bench import bench_train

    result = bench_train(c.settings, steps=c.bench_steps, profile=c.profile)
    table("measured", "", rows=((name, shown(value)) for name, value in result["measured"].items()))
    if c.profile:
        print()
        table("part of a step", "ms", "share", rows=((name, f"{ms:.1f}", f"{100 * share:.0f} %")
                                                     for name, (ms, share) in result["profile"].items()))
    save(c.out, result)


def bench_generate(argv: list[str]) -> None:
    c = parse(BenchGenerateCommand, argv, "forge bench generate")
    usable(c.out)
    from forge.bench import bench_generate

    result = bench_generate(preset(c.preset), prompt_tokens=c.prompt_tokens, new_tokens=c.new_tokens, batches=c.batches,
                            dtypes=c.dtypes, device=c.device)
    rows = result["measured"]
    table(*(name.replace("_", " ") for name in rows[0]), rows=([shown(value) for value in row.values()] for row in rows))
    save(c.out, result)


def bench_attention(argv: list[str]) -> None:
    c = parse(BenchAttentionCommand, argv, "forge bench attention")
    usable(c.out)
    usable(c.plot, "--plot")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")      # as in bench_train
    from forge.bench_attention import bench_attention

    result = bench_attention(c.shapes, dtype=c.dtype, device=c.device, plot=c.plot)
    rows = result["measured"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        here = [row for row in rows if row["shape"] == shape]
        able = sorted((row for row in here if row["reason"] is None), key=lambda row: row["forward_ms"] + row["backward_ms"])
        table(f"{shape} {here[0]['dtype']}", "ms forward", "backward", "TFLOP/s", "backward", "MiB", "error", "ratio",
              rows=([row["name"], *(shown(row[name]) for name in ("forward_ms", "backward_ms", "forward_tflops",
                                                                  "backward_tflops")),
                     *("-" if row[name] is None else f"{row[name]:{form}}" for name, form in (
                         ("memory_mib", ",.0f"), ("error", ".0e"), ("ratio", ".2f")))] for row in able))
        for row in here:
            if row["reason"] is not None:
                print(f"{row['name']}: {row['reason']}")
        print()
    if c.plot:
        print(f"drawn: {c.plot}")
    save(c.out, result)


def shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}" if isinstance(
        value, float | int) else str(value)


def usable(out: str | None, flag: str = "--out") -> None:
    """Raises RequestError, before the work is done, for a file that could not be written after it."""
    if out is None:
        return
    parent = Path(out).absolute().parent
    reason = ("this is a folder" if Path(out).is_dir() or out.endswith(("/", os.sep)) else
              "there is no such folder" if not parent.is_dir() else
              "this folder may not be written to" if not os.access(parent, os.W_OK) else "")
    if reason:
        raise RequestError(f"{flag} {out}: {reason}; name a file in a folder that is there")


def save(out: str | None, result: dict[str, Any]) -> None:
    if out:
        Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"kept in {out}")


def data(argv: list[str]) -> None:
    verbs_of("data", {"prepare": data_prepare, "info": data_info}, argv,
             "usage: forge data prepare TEXT ... --out DIR\n       forge data info DIR")


def data_prepare(argv: list[str]) -> None:
    c = parse(PrepareCommand, argv, "forge data prepare")
    if not c.text:
        raise RequestError("forge data prepare: no text is named; type: forge data prepare TEXT ... --out DIR")
    from forge.data.prepare import prepare

    config = DataConfig(text=c.text, valid=c.valid, text_field=c.text_field, skip_bad_lines=c.skip_bad_lines,
                        tokenizer=c.tokenizer, bpe_vocab=c.bpe_vocab)
    prepare(config, Path(c.out))
    print(f"made {c.out}; train on it with: forge train {c.out}")


def data_info(argv: list[str]) -> None:
    c = parse(InfoCommand, argv, "forge data info")
    from forge.data.loader import Tokens
    from forge.data.prepare import is_prepared
    from forge.tokenizer import Tokenizer

    if not is_prepared((c.folder,)):
        raise RequestError(f"{c.folder} is no folder that `forge data prepare` made; in a run it is RUN/data")
    tokenizer = Tokenizer.load(Path(c.folder) / "tokenizer.json")
    print(f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.hash[:12]}")
    for part in ("train", "valid"):
        tokens = Tokens(Path(c.folder) / part, tokenizer.hash)
        print(f"{part}: {tokens.documents:,} documents, {tokens.bytes:,} bytes, {len(tokens):,} tokens "
              f"({tokens.bytes / len(tokens):.2f} bytes a token) in {len(tokens.shards)} shards")


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": train, "sample": sample, "chat": chat, "eval": evaluate, "report": report, "tokenizer": tokenizer, "data": data,
    "doctor": doctor, "bench": bench}


def main(argv: list[str] | None = None) -> int:
    """Runs one verb and exits: 0 done, 1 failed, 2 a wrong request, 128 + n ended by signal n."""
    # a thread of libgomp waits by spinning for very long; when another program takes a core, each wait then costs the
    # turn that the awaited thread needs, and a step takes 30 times as long instead of 5. Read when torch is loaded
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] == "--version":
        print(f"forge {forge.__version__}")
        return 0
    def end(number: int, _: object) -> None:
        raise Interrupted("stopped", number)      # so that what is half made is cleared away

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):     # SIGINT too: a background job inherits it ignored
            signal.signal(number, end)
    try:
        if argv[0] not in VERBS:
            raise RequestError(f"{argv[0]}: there is no such verb; {nearest(argv[0], list(VERBS))} (see forge --help)")
        VERBS[argv[0]](argv[1:])
        return 0
    except Interrupted as stopped:
        print(f"forge: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except (RequestError, Failure) as error:
        if debug:
            raise
        text = str(error)
        if argv[0] in ("data", "eval", "tokenizer"):        # there the settings of data have no prefix
            text = re.sub(r"(?<!train with )--data\.", "--", text)
        print(f"forge: {text}", file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:     # a path of the user's
        if debug:
            raise
        print(f"forge: {error.filename}: {error.strerror}; name another place, or make this one usable", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        print("\nforge: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # the reader has left: no second complaint
        return 0
    except OSError as error:                # a disk that is full, or gone
        if debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"forge: {where}{error.strerror or error}; what was half made is removed", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
