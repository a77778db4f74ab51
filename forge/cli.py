"""The command line: a verb, its typed arguments, one call. A verb is imported when it runs."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from forge.config import Config, DataConfig, Failure, Interrupted, RequestError, load_json, load_toml, nearest
from forge.presets import PRESETS, preset

HELP = """usage: forge VERB ...

Forge trains language models from scratch: raw text in, a model that writes out.

  forge train [TEXT ...]            trains on files and folders of text; no argument: a small model of Shakespeare
  forge train --resume RUN          goes on with a run where it stopped
  forge sample RUN                  writes with a trained model
  forge eval RUN [TEXT ...]         loss and bits per byte, on the run's validation text or another
  forge data prepare TEXT ... --out DIR     turns text into token shards, to train on many times
  forge data info DIR               says what is in such a folder

`forge VERB --help` tells a verb's arguments. Every setting of training is a flag, such as --model.dim or
--train.minutes. --debug shows the whole traceback of an error. Presets: """ + ", ".join(PRESETS)

Text = tyro.conf.Positional[tuple[str, ...]]


@dataclass(frozen=True)
class TrainCommand:
    """Trains a model on text and makes a run folder: weights, tokenizer, metrics, config.

    Settings come from the preset, then the config file, then the flags below (shown with the preset's values).
    """

    config: str | None = None
    """a TOML file of settings, such as [train] minutes = 30"""
    run: str | None = None
    """the folder to make (default: runs/PRESET-N)"""
    resume: str | None = None
    """a run to go on with"""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class SampleCommand:
    """Writes with a trained model, token by token."""

    run: tyro.conf.Positional[str]
    """a run folder"""
    prompt: str = ""
    """what the text begins with; empty: a new document"""
    max_new_tokens: int = 500
    temperature: float = 0.8
    """below 1 likelier, above 1 wilder; 0 always takes the likeliest token"""
    top_k: int = 0
    """take only from the k likeliest tokens; 0: from all"""
    top_p: float = 1.0
    """take only from the likeliest tokens that together have this probability"""
    seed: int = 1
    """one seed gives one text"""
    checkpoint: str = "best"
    """best, latest, or a step"""
    device: str = "auto"
    """auto, cuda, mps or cpu"""


@dataclass(frozen=True)
class EvalCommand:
    """Loss (nats per token) and bits per byte of a checkpoint, over every token of a text."""

    run: tyro.conf.Positional[str]
    """a run folder"""
    text: Text = ()
    """files and folders of text; none: the run's own validation text"""
    checkpoint: str = "best"
    """best, latest, or a step"""
    device: str = "auto"
    """auto, cuda, mps or cpu"""
    text_field: str = "text"
    """the field of a .jsonl record that holds the text"""


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
    """chars, bytes, bpe, or a tokenizer.json; without it chosen by the amount of text"""
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

    if resumed:
        resume(resumed, command.settings)
    else:
        train(command.settings, run=command.run)


def run_config(run: str, flag: str) -> Config:
    if not Path(run).is_dir():
        raise RequestError(f"{flag} {run}: no such run folder; `forge train` makes one and prints its name")
    return load_json(Path(run) / "config.json")


def sample(argv: list[str]) -> None:
    c = parse(SampleCommand, argv, "forge sample")
    if c.max_new_tokens < 0 or c.temperature < 0 or c.top_k < 0 or not 0 < c.top_p <= 1:
        raise RequestError(f"--max-new-tokens {c.max_new_tokens} --temperature {c.temperature} --top-k {c.top_k} --top-p "
                           f"{c.top_p}: the first three are 0 or more, and top-p lies above 0 and is at most 1")
    from forge.generate import generate, load_model, start

    model, tokenizer = load_model(c.run, checkpoint=c.checkpoint, device=c.device)
    prompt = start(tokenizer, c.prompt)
    ids = generate(model, prompt, c.max_new_tokens, temperature=c.temperature, top_k=c.top_k, top_p=c.top_p, seed=c.seed,
                   eot=tokenizer.eot)
    print(c.prompt, end="", flush=True)
    for text in tokenizer.stream(ids):
        print(text, end="", flush=True)
    print()


def evaluate(argv: list[str]) -> None:
    c = parse(EvalCommand, argv, "forge eval")
    from forge.evaluation import evaluate

    result = evaluate(c.run, c.text, checkpoint=c.checkpoint, device=c.device, text_field=c.text_field)
    print(f"{result.loss:.4f} nats per token, {result.bpb:.4f} bits per byte, over {result.tokens:,} tokens of "
          f"{result.bytes:,} bytes")


def data(argv: list[str]) -> None:
    verbs: dict[str, Callable[[list[str]], None]] = {"prepare": data_prepare, "info": data_info}
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: forge data prepare TEXT ... --out DIR\n       forge data info DIR\n\n"
              "`forge data prepare --help` tells the arguments.")
    elif argv[0] not in verbs:
        raise RequestError(f"forge data {argv[0]}: there is no such verb; {nearest(argv[0], list(verbs))}")
    else:
        verbs[argv[0]](argv[1:])


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
    from forge.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(c.folder) / "tokenizer.json")
    print(f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.hash[:12]}")
    for part in ("train", "valid"):
        tokens = Tokens(Path(c.folder) / part, tokenizer.hash)
        print(f"{part}: {tokens.documents:,} documents, {tokens.bytes:,} bytes, {len(tokens):,} tokens "
              f"({tokens.bytes / len(tokens):.2f} bytes a token) in {len(tokens.shards)} shards")


VERBS: dict[str, Callable[[list[str]], None]] = {"train": train, "sample": sample, "eval": evaluate, "data": data}


def main(argv: list[str] | None = None) -> int:
    """Runs one verb and exits: 0 done, 1 failed, 2 a wrong request, 128 + n ended by signal n."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
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
        print(f"forge: {error}", file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1
    except KeyboardInterrupt:
        if debug:
            raise
        print("\nforge: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # the reader has left: no second complaint
        return 0


if __name__ == "__main__":
    sys.exit(main())
