"""forge train: from a config to a trained run folder. `loop` holds the training step; the rest prepares for it."""

from __future__ import annotations

import gc
import glob
import math
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from rich.console import Console
from torch import Tensor

from forge import checkpoint, config, generate, machine, optim, plan
from forge.choices import choose, require
from forge.config import Config, Failure, Interrupted, RequestError, validate
from forge.data import prepare
from forge.data.loader import Batch, Feed, Tokens, needs_mask
from forge.evaluation import score
from forge.generate import Completion, Sampling, load_weights
from forge.graph import Replayed
from forge.guard import Guard, diagnosis
from forge.metrics import Metrics, Reading, duration
from forge.model.transformer import Transformer, init_weights
from forge.tokenizer import KINDS, Tokenizer

TOKENS_PER_PARAMETER = 20       # the default budget (Hoffmann et al. 2022, arXiv:2203.15556) ...
MOST_EPOCHS = 10                # ... but not more rounds over the text than this
NOTE_STEP = 30                  # where a budget in minutes is known in tokens
EPOCHS_BEFORE_DROPOUT = 4       # up to here repeated text is almost as good as new (arXiv:2305.16264)
# what may differ when a run is resumed: how long it goes on, and what happens beside the steps
CHANGEABLE = {"train.steps", "train.tokens", "train.minutes", "train.eval_every", "train.sample_every",
              "train.save_every", "train.keep", "train.keep_every", "train.micro_batch", "train.recompute"}
MOST_SKIPPED = 8                # steps in a row that change nothing; then the run goes back to its last checkpoint

# what a folder may hold for a run to be made in it
OF_A_RUN = {"data", "tokenizer.json", "environment.json", "metrics.jsonl", "checkpoints", "latest", "best", ".lock",
            ".writer"}

Say = Callable[[str], None]


def train(config: Config, *, run: str | Path | None = None) -> Path:
    """Trains a new model and returns its run folder.

    run: the folder to make, runs/PRESET-N when None. With config.init, the best weights and the tokenizer of that run
    are taken over, with a fresh optimizer and schedule; config.model must then be that run's.
    Raises RequestError for a config, text or folder that cannot be used, with nothing left behind; Failure when the
    loss is no number; Interrupted after SIGINT or SIGTERM, when the run is saved.
    """
    console = Console()
    run = Path(run) if run is not None else next_run(config.preset)
    if (run / "config.json").exists():
        raise RequestError(f"{run} exists; go on with it by: forge train --resume {run}, or name another by --run")
    if run.exists() and (strange := sorted({path.name for path in run.iterdir()} - OF_A_RUN) if run.is_dir() else ["text"]):
        raise RequestError(f"{run} exists and is no run (it holds {', '.join(strange[:3])}); name another by --run")
    say(console, f"forge train: preset {config.preset}, run {run}")
    partial = run.with_name(f".{run.name}.partial-{os.getpid()}")
    for left in run.parent.glob(f".{glob.escape(run.name)}.partial-*"):
        if (pid := left.name.rpartition("-")[2]).isdigit() and not psutil.pid_exists(int(pid)):     # it was killed
            shutil.rmtree(left, ignore_errors=True)
    made_parent = not run.parent.exists()
    try:
        config = new_run(config, partial, lambda text: say(console, text))
        if run.exists():        # without a config.json: whoever made it was stopped
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):     # that one last
                if (there := run / path.name).is_dir():
                    shutil.rmtree(there)
                path.rename(there)
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        else:
            partial.rename(run)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made_parent and not run.exists() and run.parent.exists():
            run.parent.rmdir()
    return loop(config, run, console)


def resume(run: str | Path, config: Config | None = None, *, agree: Callable[[], None] = lambda: None) -> Path:
    """Goes on with a run from its newest checkpoint, or from its beginning when it has none.

    config: the run's own with changes, of which only those in CHANGEABLE may be. agree is called when they have been
    listed, and raises what keeps them from being made. A finished run is left as it is.
    Raises RequestError for a change that would make it another run, or while another process trains it; Failure when no
    checkpoint is whole.
    """
    run, console = Path(run), Console()
    saved = load_config(run, "--resume")
    config = settled(validate(config), saved) if config else saved
    changes = differences(asdict(saved), asdict(config))
    for key, (old, new) in changes.items():
        if key not in CHANGEABLE:
            raise RequestError(f"--{key.replace('_', '-')} {new}: this run has {old}, and with another it would be "
                               f"another run. Leave it out, or begin a new run without --resume")
    done, t = (checkpoint.steps(run) or [0])[-1], config.train
    if changes and ((t.steps or done) < done or (t.tokens or done * t.batch_tokens) < done * t.batch_tokens):
        raise RequestError(f"{run} is at step {done:,} ({done * t.batch_tokens:,} tokens) already; give it a larger budget "
                           "(--train.steps, --train.tokens), or leave it out")
    for key, (old, new) in changes.items():
        say(console, f"change: {key} {old} -> {new}")
    if changes:
        agree()
    return loop(config, run, console, save_config=bool(changes))


def settled(c: Config, saved: Config) -> Config:
    """c with what it leaves to be derived filled in. Raises RequestError for a run without an end."""
    t, s = c.train, saved.train
    if not (t.steps or t.tokens or t.minutes):
        raise RequestError("without --train.steps, --train.tokens and --train.minutes the run would have no end; give one")
    t = replace(t, eval_every=s.eval_every if t.eval_every is None else t.eval_every,
                sample_every=s.sample_every if t.sample_every is None else t.sample_every,
                save_every=s.save_every if t.save_every is None else t.save_every)
    c = replace(c, train=t)
    return plan.fit(c, machine.pick_device(t.device))[0] if t.micro_batch == 0 or t.recompute == "auto" else c


def load_config(run: Path, flag: str) -> Config:
    """The config of the run that a flag names."""
    if not run.is_dir():
        raise RequestError(f"{flag} {run}: no such run folder; `forge train` makes one and prints its name")
    return config.load_json(run / "config.json")


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """{dotted key: (old, new)} where two configs differ."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, value in old.items():
        if isinstance(value, dict):
            found |= differences(value, new[key], f"{prefix}{key}.")
        elif value != new[key]:
            found[prefix + key] = (value, new[key])
    return found


def new_run(c: Config, folder: Path, say: Say) -> Config:
    """Makes the run folder: data, tokenizer, config.json, environment.json. Returns the config, wholly resolved."""
    c = validate(c)
    device = machine.pick_device(c.train.device)
    machine.settle_cpu(c.train.threads)
    require(c, device)
    theirs = load_config(Path(c.init), "--init") if c.init else None
    tokenizer = Tokenizer.load(Path(c.init) / "tokenizer.json") if c.init else None
    folder.mkdir(parents=True)
    if prepare.is_prepared(c.data.text):
        data = Path(c.data.text[0]).resolve()
        tokenizer = tokenizer or prepared_tokenizer(c, data)
        c = replace(c, data=replace(c.data, text=(str(data),)))
        say(f"data: {data}, prepared")
        say(f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, of that folder")
    else:
        data = folder / "data"
        tokenizer = prepare.prepare(c.data, data, tokenizer, say)
    tokenizer.save(folder / "tokenizer.json")
    train_tokens, valid_tokens = (Tokens(data / part, tokenizer.hash) for part in ("train", "valid"))

    vocab = c.model.vocab_size or tokenizer.vocab_size
    if vocab < tokenizer.vocab_size:
        raise RequestError(f"model.vocab_size={vocab} is smaller than the tokenizer's {tokenizer.vocab_size} tokens; "
                           "leave --model.vocab-size out, or set it to as many")
    if vocab > tokenizer.vocab_size:
        say(f"model: {vocab:,} rows of vocabulary, of which the tokenizer uses {tokenizer.vocab_size:,}")
    c = replace(c, model=replace(c.model, vocab_size=vocab).resolve())
    if theirs:
        for key, (old, new) in differences(asdict(theirs.model), asdict(c.model)).items():
            if key not in ("dropout", "z_loss"):
                raise RequestError(f"--model.{key.replace('_', '-')} {new}: the weights of {c.init} are of a model with "
                                   f"{old}; leave it out, or begin without --init")
        checkpoint.load(Path(str(c.init)), "best")      # whole, before anything is made
        say(f"weights: the best of {c.init}")
    c = budget(c, train_tokens, len(valid_tokens), say)
    c = choose(c, device, needs_mask(train_tokens, c.model.seq_len), say)
    config.save_json(c, folder / "config.json")
    with_data = machine.environment(device) | {"data": [part.hash for part in (train_tokens, valid_tokens)]}
    config.write_json(with_data, folder / "environment.json")
    return c


def prepared_tokenizer(c: Config, data: Path) -> Tokenizer:
    """The tokenizer of a prepared folder, or the file that the config names, which must be the same."""
    made = Tokenizer.load(data / "tokenizer.json")
    asked = c.data.tokenizer
    if c.data.valid or c.data.bpe_vocab or (asked in KINDS and asked != made.kind):
        raise RequestError(f"{data} is prepared: its validation part and its tokenizer ({made.kind}, {made.vocab_size:,} "
                           "tokens) stand; leave --data.valid, --data.tokenizer and --data.bpe-vocab out, or prepare anew")
    return made if asked is None or asked in KINDS else Tokenizer.load(asked)


def budget(c: Config, tokens: Tokens, valid_tokens: int, say: Say) -> Config:
    """The budget and the intervals, derived where they are not given, and what they mean for this text."""
    t, m = c.train, c.model
    if len(tokens) <= m.seq_len:
        say(f"data: {len(tokens)} tokens are less than one window of {m.seq_len}: each window holds copies of the text, "
            "which do not see each other")
    if not (t.steps or t.tokens or t.minutes):
        most = MOST_EPOCHS * len(tokens)
        t = replace(t, tokens=max(t.batch_tokens, min(TOKENS_PER_PARAMETER * m.parameters, most)))
        how = (f"{MOST_EPOCHS} rounds over the text" if t.tokens == most
               else f"{TOKENS_PER_PARAMETER} a parameter, at least one step")
        say(f"budget: {t.tokens:,} tokens ({how}); --train.minutes, --train.steps or --train.tokens set another")
    every = max(1, round(10 * valid_tokens / t.batch_tokens))       # a forward costs about half a step's token, or less
    t = replace(t, eval_every=every if t.eval_every is None else t.eval_every)
    t = replace(t, sample_every=4 * (t.eval_every or 0) or None if t.sample_every is None else t.sample_every,
                save_every=t.eval_every if t.save_every is None else t.save_every)
    planned = min([n for n in (t.tokens, t.steps and t.steps * t.batch_tokens) if n], default=0)
    limits = [f"{t.steps:,} step{'s' * (t.steps > 1)}" if t.steps else "", f"{t.tokens:,} tokens" if t.tokens else "",
              f"{t.minutes:g} minutes" if t.minutes else ""]
    epochs = f", {planned / len(tokens):.1f} rounds over the text" if planned else ""
    say(f"budget: {' or '.join(filter(None, limits))}{epochs}; an evaluation "
        + (f"every {t.eval_every:,} steps" if t.eval_every else "at the end"))
    say_dropout(planned, len(tokens), m.dropout, say)
    return replace(c, train=t)


def say_dropout(planned: float, text_tokens: int, dropout: float, say: Say) -> None:
    if planned > EPOCHS_BEFORE_DROPOUT * text_tokens and not dropout:
        say(f"note: {planned / text_tokens:.1f} rounds over the text invite learning it by heart; if the validation "
            "loss turns up, try --model.dropout 0.1")


# Ctrl-C, a job's end, its warning (Slurm's --signal=USR1), a terminal that was closed
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]


class AtOnce(BaseException):
    """Not to be caught by those who catch every Exception."""


class Stop:
    """What the first of SIGNALS sets; a second one ends the process at once. While `at_once` holds the first one does so,
    too: until a step is done in this process, which may wait long for the compiler, there is nothing to save."""

    def __init__(self, run: Path) -> None:
        self.number, self.at_once, self.run = 0, True, run

    def __call__(self) -> bool:
        return self.number != 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self.number = number
            signal.signal(number, signal.SIG_DFL)
            if self.at_once:
                raise AtOnce

        try:
            before = {n: signal.signal(n, note) for n in SIGNALS
                      if n != getattr(signal, "SIGHUP", None) or signal.getsignal(n) != signal.SIG_IGN}      # nohup's
        except ValueError:      # not in the main thread: signals are the caller's
            before = {}
        try:
            yield
        except (AtOnce, Exception) as error:
            if self.at_once and self.number:        # an Exception, too, of a compiler that was interrupted
                raise self.interrupted("stopped, with nothing to save") from error
            raise
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)

    def interrupted(self, words: str) -> Interrupted:
        return Interrupted(f"{words}; go on with: forge train --resume {self.run}", self.number)


class Progress(NamedTuple):
    """How far a run is, kept in a checkpoint's state.json."""

    step: int = 0
    elapsed_s: float = 0.0          # since the first step began, over all resumes
    best_loss: float | None = None
    best_step: int = 0
    skipped: int = 0                # steps in a row, up to this one, that changed nothing
    jumped: int = 0                 # training windows that were passed over when the run went back

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Progress:
        """What _asdict() gave, read back from a file. Raises Failure when that holds anything else."""
        try:
            at = cls(**state)
            numbers = [value for name, value in at._asdict().items() if not (name == "best_loss" and value is None)]
            if not all(type(value) in (int, float) and 0 <= value < 1e18 for value in numbers):
                raise TypeError("a value is no number, or out of range")
            return at
        except TypeError as error:
            raise Failure(f"state.json of a checkpoint is not what Forge wrote: {error}") from error

    def of(self, c: Config) -> float:
        """The spent part of the budget: the largest of the parts of steps, tokens and minutes."""
        t = c.train
        parts = (self.step / t.steps if t.steps else 0.0, self.step * t.batch_tokens / t.tokens if t.tokens else 0.0,
                 self.elapsed_s / 60 / t.minutes if t.minutes else 0.0)
        return max(parts)


def restore(run: Path, c: Config, model: Transformer, optimizers: list[torch.optim.Optimizer], guard: Guard, say: Say
            ) -> Progress:
    """Gives all of them the state of the newest whole checkpoint, or that of a beginning, and returns how far it is."""
    saved = checkpoint.newest(run, say)
    if saved:
        load_weights(model, saved)
        optim.load_state_tensors(model, optimizers, saved.optimizer)
        guard.load(saved.optimizer)
        return Progress.of_state(saved.state)
    for optimizer in optimizers:
        optimizer.state.clear()
    guard.begin()
    if c.init:
        load_weights(model, checkpoint.load(Path(c.init), "best"))
    else:
        init_weights(model, c.seed)
    return Progress()


def loop(c: Config, run: Path, console: Console, *, save_config: bool = False) -> Path:
    """Trains the run to the end of its budget, from its newest checkpoint if it has one."""
    t, m, device = c.train, c.model, machine.pick_device(c.train.device)
    machine.settle_cpu(t.threads)
    machine.bound_memory(device)
    stop = Stop(run)
    with checkpoint.lock(run), machine.deterministic(t.deterministic), stop.listening():
        tokenizer = prepare.tokenizer_of(run)
        data = prepare.folder_of(run)
        tokens, valid = (Tokens(data / part, tokenizer.hash) for part in ("train", "valid"))
        same_data(run, lambda text: say(console, text), tokens, valid)
        mask, ahead = needs_mask(tokens, m.seq_len), device.type == "cuda"

        if ahead:
            torch.cuda.set_stream(torch.cuda.Stream())      # a graph cannot be recorded on the default one
        with torch.device("meta"):
            model = Transformer(m, getattr(torch, t.dtype), t.attention, t.recompute, t.fp8)
        model.to_empty(device=device)
        optimizers = optim.optimizers(model, c.optim, getattr(torch, t.dtype), compiled=bool(t.compile) and ahead)
        guard = Guard(device)
        at = restore(run, c, model, optimizers, guard, lambda text: say(console, text))
        if save_config:
            config.save_json(c, run / "config.json")
        if at.of(c) >= 1:
            say(console, f"{run} is finished: step {at.step:,}. To go on, give it a larger budget: {longer(c, at)}; "
                f"to see it write: forge sample {run}")
            return run
        if at.step:
            say(console, f"resumed {run} at step {at.step:,}")
        if t.compile:
            model.compile_parts()

        sequences = t.batch_tokens // m.seq_len

        def forward_backward(inputs: Tensor, targets: Tensor, starts: Tensor | None) -> Tensor:
            part = model(inputs, targets, starts) * (t.micro_batch / sequences)     # mean nats per token of the step
            part.backward()
            return part.detach()

        def recorded() -> Callable[..., Tensor]:
            graphs = ahead and not (t.recompute == "full" and m.dropout)    # which puts random states back: not in a graph
            return Replayed(forward_backward) if graphs else forward_backward

        if ahead:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)                # where it is, a graph adds to it
        part_of_step = recorded()
        feed = Feed(tokens, m.seq_len, c.seed, mask, device)
        metrics = Metrics(run / "metrics.jsonl", at.step, console)
        readings: deque[Reading] = deque()      # steps that the device still works on: the host runs one ahead of it
        began, elapsed_before = time.monotonic(), at.elapsed_s
        before: Reading | float = began
        progress, stopping = at.of(c), stop()
        went_back = (-1, 0)                     # to this step, from this one
        sure, failed = (at.best_loss, at.best_step), None      # the best that is on the disk; why the last save is not
        owed = False                            # a save: a state among skipped steps is none to go back to

        def log(record: dict[str, Any]) -> None:
            metrics.log(record, progress, (1 / max(progress, 1e-9) - 1) * at.elapsed_s)

        def saved(error: Exception | None) -> None:
            """What became of a save. One that failed is said, and tried again at the next."""
            nonlocal at, sure, failed
            failed = error
            if error is None:
                sure = at.best_loss, at.best_step
            else:
                metrics.say(f"the checkpoint could not be saved ({error}); training goes on, and the next one is tried")
                at = at._replace(best_loss=sure[0], best_step=sure[1])

        def save(best: bool) -> None:
            """Begins a save; the one before is on the disk then, or was said not to be."""
            if writer.job:
                saved(writer.wait())
            try:
                metrics.sync()
                writer.start(at.step, model.state_dict(), optim.state_tensors(model, optimizers) | guard.tensors(),
                             at._asdict(), best)
            except OSError as error:
                saved(error)

        model.train()
        with without_gc(), metrics, checkpoint.Writer(run, t.keep, t.keep_every) as writer:
            while progress < 1 and not stopping:
                if m.dropout:
                    torch.manual_seed((c.seed << 32) + at.step & (1 << 63) - 1)     # so no state need be kept
                loss, less, changed = torch.zeros((), device=device), None, False
                window = at.step * sequences + at.jumped
                try:
                    for first in range(0, sequences, t.micro_batch):        # equals one large batch: all hold as many tokens
                        if stop():
                            break
                        inputs, targets, starts = feed(window + first, t.micro_batch)       # (B, T) each
                        loss += part_of_step(inputs, targets, starts)
                    if stop():          # within a step, which may take minutes: it is begun anew when the run is resumed
                        for reading in readings:
                            log(reading.record(before, t.batch_tokens))
                            before = reading
                        save(best=False)
                        break
                    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.optim.clip or math.inf)
                    bad = guard.judge(loss, grad_norm)
                    optim.set_lr(optimizers, optim.lr_factor(at.step, progress, c.optim))
                    changed = True
                    optim.step(optimizers, bad)
                    for optimizer in optimizers:
                        optimizer.zero_grad(set_to_none=not ahead)
                except RuntimeError as error:
                    if not machine.out_of_memory(error):
                        raise
                    less = with_less_memory(c, str(error), metrics.say)
                if less:        # after the handler, which holds what the failed part had made
                    c, t = less, less.train
                    config.save_json(c, run / "config.json")
                    model.set_recompute(t.recompute)
                    model.zero_grad(set_to_none=not ahead)
                    part_of_step = recorded()
                    machine.empty_cache(device)
                    if changed:     # some weights, it may be: what was saved is whole
                        saved(writer.wait())
                        at = restore(run, c, model, optimizers, guard, metrics.say)._replace(elapsed_s=at.elapsed_s)
                        sure = at.best_loss, at.best_step
                        metrics.go_back(at.step)
                        readings.clear()
                        progress, before = at.of(c), time.monotonic()
                    continue

                lr = optimizers[-1].param_groups[0]["lr"]
                readings.append(Reading(at.step + 1, lr, (window, window + sequences), loss, grad_norm, bad))
                at = at._replace(step=at.step + 1, elapsed_s=elapsed_before + time.monotonic() - began)
                progress, stopping, stop.at_once = at.of(c), stop(), False
                something = progress >= 1 or stopping or owed or at.step == NOTE_STEP or any(
                    due(at.step, every) for every in (t.eval_every, t.sample_every, t.save_every))
                late = 1 if ahead and not something else 0
                record: dict[str, Any] = {}
                while len(readings) > late and at.skipped < MOST_SKIPPED:
                    if record:
                        log(record)
                    record = readings[0].record(before, t.batch_tokens)
                    before = readings.popleft()
                    at = at._replace(skipped=at.skipped + 1 if "skipped" in record else 0)
                if at.skipped >= MOST_SKIPPED:
                    log(record)
                    saved(writer.wait())
                    newest = (checkpoint.steps(run) or [0])[-1]
                    if newest == went_back[0] and record["step"] <= went_back[1]:      # no further than the last time
                        raise Failure(ran_away(record, run, diagnosis(model, Batch(inputs, targets, starts))))
                    end, elapsed_s = record["windows"][1], at.elapsed_s
                    at = restore(run, c, model, optimizers, guard, metrics.say)
                    at = at._replace(jumped=end - at.step * sequences, skipped=0, elapsed_s=elapsed_s)
                    went_back, sure = (at.step, record["step"]), (at.best_loss, at.best_step)
                    metrics.go_back(at.step, {"step": at.step, "went_back_from": record["step"], "next_window": end})
                    readings.clear()
                    progress, before = at.of(c), time.monotonic()
                    continue
                if not something:
                    if record:
                        log(record)
                    if writer.done():
                        saved(writer.wait())
                    if not ahead:
                        gc.collect(0)
                    continue

                if due(at.step, t.eval_every) or progress >= 1:
                    result = score(model, valid, stop)
                    if result:
                        record |= {"val_loss": result.loss, "val_bpb": result.bpb}
                best = "val_loss" in record and (at.best_loss is None or record["val_loss"] < at.best_loss)
                if due(at.step, t.sample_every) and not stop():
                    record["sample"] = write(model, tokenizer, c.seed, 120, stop)
                    metrics.say(f"--- step {at.step:,} writes:\n{record['sample']}\n---")
                log(record)
                stopping = stop()
                owed = owed or due(at.step, t.save_every) or best
                if (owed and not at.skipped) or progress >= 1 or stopping:
                    owed = False
                    if best:
                        if writer.job:
                            saved(writer.wait())
                        at = at._replace(best_loss=record["val_loss"], best_step=at.step)
                    save(best)
                if at.step == NOTE_STEP and t.minutes and not (t.steps or t.tokens):
                    say_dropout(record["tokens_per_s"] * 60 * t.minutes, len(tokens), m.dropout, metrics.say)
                gc.collect()
                before = time.monotonic()
            if writer.job:
                saved(writer.wait())
        if failed:
            there = checkpoint.steps(run)
            raise Failure(f"the last checkpoint could not be saved: {failed}; make room, and go on from "
                          f"{f'step {there[-1]:,}' if there else 'the beginning'} with: forge train --resume {run}")
        if stop():
            raise stop.interrupted("stopped and saved")
        report(run, c, at, tokens, model, tokenizer, console, stop)
    return run


def same_data(run: Path, say: Say, *parts: Tokens) -> None:
    """Raises RequestError when a data folder is not the one that the run began with."""
    began_with = read_environment(run, say).get("data")
    if began_with is not None and began_with != [part.hash for part in parts]:
        raise RequestError(f"{prepare.folder_of(run)} holds other tokens than when {run} began with it; put the old ones "
                           "back, or begin a new run without --resume")


def read_environment(run: Path, say: Say) -> dict[str, Any]:
    path = run / "environment.json"
    try:
        return dict(config.parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        say(f"{path} is missing or damaged: whether the data is what the run began with cannot be told")
        return {}


def due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0


def with_less_memory(c: Config, error: str, say: Say) -> Config:
    """The next smaller setting after the device's memory ran out, said aloud. Raises Failure when there is none."""
    less = plan.smaller(c)
    words = f"out of memory ({error.splitlines()[0]}). A step was planned to take\n{plan.table(c)}"
    if less is None:
        raise Failure(f"{words}\nand no smaller setting is left; name a smaller --preset, or set a smaller --model.dim, "
                      "--model.n-layers or --model.seq-len")
    say(f"{words}\nso it goes on with {plan.said(less)}: the batch of {c.train.batch_tokens:,} tokens stays as it is")
    return less


def ran_away(record: dict[str, Any], run: Path, found: str) -> str:
    return (f"{MOST_SKIPPED} steps in a row, up to step {record['step']:,}, had a loss or a gradient that is no number or "
            "far above the last ones', and again after the run had gone back to its last checkpoint and passed them over. "
            f"They changed nothing: the checkpoints in {run} are as they were. In the last batch {found}\nBegin again with "
            f"a lower rate (--optim.lr, --optim.muon-lr) or look at the text of these windows: {record['windows']}")


@contextmanager
def without_gc() -> Iterator[None]:
    """Keeps Python's garbage collector out of the steps: it would stop them at any moment to look through all objects."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def write(model: Transformer, tokenizer: Tokenizer, seed: int, n: int, stop: Stop) -> str:
    """A short text of the model as it is, as far as a signal or the device's memory lets it come."""
    model.eval()
    text = Completion("", seed)
    try:
        for _ in generate.write(model, tokenizer, [text], max_new_tokens=n, sampling=Sampling(temperature=0.8)):
            if stop():
                break
    except RuntimeError as error:
        if not machine.out_of_memory(error):
            raise
        text.text += " (the device has no memory left to write on)"
    model.train()
    return text.text


def longer(c: Config, at: Progress) -> str:
    """The flags of a budget twice as large; each limit that was set must be raised, for the first to end ends the run."""
    t = c.train
    flags = [("minutes", t.minutes and f"{2 * t.minutes:g}"), ("steps", t.steps and 2 * at.step),
             ("tokens", t.tokens and 2 * at.step * t.batch_tokens)]
    return " ".join(f"--train.{name} {value}" for name, value in flags if value)


def report(run: Path, c: Config, at: Progress, tokens: Tokens, model: Transformer, tokenizer: Tokenizer,
           console: Console, stop: Stop) -> None:
    """The last words of a run: what was reached, two samples, what to type next."""
    rounds = at.step * c.train.batch_tokens / len(tokens)
    say(console, f"\ndone: {at.step:,} step{'s' * (at.step > 1)}, {at.step * c.train.batch_tokens:,} tokens ({rounds:.1f} "
        f"rounds over the text) in {duration(at.elapsed_s)}; best validation loss {at.best_loss:.4f} nats per token at step "
        f"{at.best_step:,}")
    for seed in (1, 2) if c.train.sample_every != 0 else ():
        say(console, f"\n--- sample {seed}\n{write(model, tokenizer, seed, 300, stop)}" + "\n---" * (seed == 2))
    say(console, f"\nThe run lies in {run}. Next:\n" + next_commands(run, c, at))


def next_commands(run: Path, c: Config, at: Progress) -> str:
    commands = {f'forge sample {run} --prompt "..."': "it writes on",
                f"forge eval {run}": "loss and bits per byte of its best checkpoint",
                f"forge report {run}": "its curves and samples as a page",
                f"forge train --resume {run} {longer(c, at)}": "goes on"}
    if not c.data.text:
        commands["forge train MY_TEXT.txt"] = "trains on your own text"
    width = max(map(len, commands))
    return "\n".join(f"  {command:{width}}   {what}" for command, what in commands.items())


def next_run(preset: str) -> Path:
    """runs/PRESET-N, N counted on from the runs that are there."""
    n = 1
    while (path := Path("runs") / f"{preset}-{n}").exists():
        n += 1
    return path


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
