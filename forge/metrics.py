"""One record a step: to metrics.jsonl, and to the progress bar (a terminal) or plain lines (elsewhere)."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from forge.config import parse_json

LINE_EVERY_S = 10.0     # between plain lines


class Reading:
    """Loss and gradient norm of one step, and whether it was skipped, on their way from the device to the host, which need
    not wait for them. windows: the first of the training windows that the step saw, and the one behind its last."""

    def __init__(self, step: int, lr: float, windows: tuple[int, int], loss: Tensor, grad_norm: Tensor, bad: Tensor) -> None:
        self.step, self.lr, self.windows, self.done = step, lr, windows, time.monotonic()
        # only where an event says when they have arrived: MPS would copy behind the host's back, too
        self.numbers = torch.stack((loss, grad_norm, bad)).to("cpu", non_blocking=loss.is_cuda)
        self.event = torch.cuda.Event(enable_timing=True) if loss.is_cuda else None
        if self.event:
            self.event.record()

    def record(self, before: Reading | float, batch_tokens: int) -> dict[str, Any]:
        """The step's record, once the device is done with it. before: the step before, or when this one began."""
        if self.event:
            self.event.synchronize()
            self.done = time.monotonic()
        if isinstance(before, float):
            step_ms = 1000 * (self.done - before)
        elif self.event and before.event:
            step_ms = before.event.elapsed_time(self.event)
        else:
            step_ms = 1000 * (self.done - before.done)
        loss, grad_norm, bad = self.numbers.tolist()
        record = {"step": self.step, "tokens": self.step * batch_tokens, "loss": loss, "lr": self.lr, "grad_norm": grad_norm,
                  "tokens_per_s": 1000 * batch_tokens / step_ms, "step_ms": step_ms}
        if bad:
            record |= {"skipped": True, "windows": self.windows}
        if not math.isfinite(loss + grad_norm):         # JSON knows no such number
            record |= {"loss": None, "grad_norm": None}
        return record


class Metrics:
    """Writes the records of a run and shows them. Records after `step` are cut off: they belong to lost work."""

    def __init__(self, path: Path, step: int, console: Console) -> None:
        last, lost = cut(path, step)
        self.path, self.waiting, self.full = path, b"", False
        self.file = path.open("ab", buffering=0)
        self.console = console
        if last < step:
            self.say(f"{path} holds no records of the steps {last + 1:,} to {step:,}")
        if lost > step:
            steps = f"step {lost:,}" if lost == step + 1 else f"steps {step + 1:,} to {lost:,}"
            self.say(f"{steps}, after its last save, will be taken again")
        self.loss, self.seen, self.val, self.last_line = 0.0, 0, "", -LINE_EVERY_S
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(TextColumn("{task.fields[step]:>7}"), BarColumn(bar_width=24),
                                TextColumn("{task.percentage:>3.0f} %  {task.fields[text]}"),
                                console=console, transient=True, refresh_per_second=4)
            self.task = self.bar.add_task("", total=1.0, step="step 0", text="the first step compiles ...")
            self.bar.start()

    def log(self, record: dict[str, Any], progress: float, left_s: float) -> None:
        """Appends one step's record; progress is the spent part of the budget, left_s what the rest should take."""
        self.append(record)
        if record.get("skipped"):
            self.say(f"step {record['step']:,} skipped: " + (
                "its loss or its gradient is no number" if record["loss"] is None else
                f"loss {record['loss']:.3f}, gradient {record['grad_norm']:.3g}, one of them far above the last steps'"))
            return
        self.seen += 1
        self.loss += (record["loss"] - self.loss) * max(0.05, 1 / self.seen)        # a mean of about 20 steps
        if "val_bpb" in record:
            self.val = f"  val {record['val_loss']:.4f} nats, {record['val_bpb']:.3f} bits/byte"
        text = (f"loss {self.loss:.3f}{self.val}  {record['tokens_per_s']:,.0f} tokens/s  "
                f"{duration(left_s)} left")
        if self.bar:
            self.bar.update(self.task, completed=progress, step=f"step {record['step']:,}", text=text)
        elif "val_bpb" in record or time.monotonic() - self.last_line >= LINE_EVERY_S:
            self.last_line = time.monotonic()
            self.say(f"step {record['step']:,}  {100 * min(progress, 1):.0f} %  {text}")

    def append(self, record: dict[str, Any]) -> None:
        """One line, on its way to the disk when this returns. While the disk is full it waits for the next one."""
        self.waiting += json.dumps(record).encode() + b"\n"
        try:
            self.write_waiting()
            self.full = False
        except OSError as error:
            if not self.full:
                self.say(f"{self.path}: {error.strerror}; its lines are kept in memory and written later")
            self.full = True

    def write_waiting(self) -> None:
        while self.waiting:         # a disk that is nearly full takes a part
            self.waiting = self.waiting[self.file.write(self.waiting):]

    def go_back(self, step: int, record: dict[str, Any] | None = None) -> None:
        """Cuts off the records after `step`, and appends this one of the run's going back."""
        self.waiting = b""
        cut(self.path, step)
        if record:
            self.append(record)
            self.say(f"went back from step {record['went_back_from']:,} to {step:,}; it goes on behind the batches between")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def sync(self) -> None:
        """Returns when all records are on the disk. Raises OSError when it is full."""
        self.write_waiting()
        os.fsync(self.file.fileno())

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
        self.file.close()


def cut(path: Path, step: int) -> tuple[int, int]:
    """Leaves the records up to `step`, and returns the step of the last one that stays and of the last one that was there,
    or 0; a line that was cut off while being written goes too, a damaged one between good ones stays. A record of going back
    to a step (`went_back_from`) belongs to what comes after it."""
    if not path.exists():
        return 0, 0
    at = kept = last = there = 0
    beyond = False
    with path.open("rb") as file:
        for line in file:
            at += len(line)
            try:
                record = parse_json(line)
                here, behind = int(record["step"]), "went_back_from" in record
            except (ValueError, KeyError, TypeError, OverflowError):
                continue
            if not line.endswith(b"\n"):
                break
            there, beyond = here, beyond or here + behind > step
            if not beyond:
                kept, last = at, here
    os.truncate(path, kept)
    return last, there


def duration(seconds: float) -> str:
    """'45 s', '3:05 min', '2:40 h', '3 d 4 h'."""
    s = round(max(seconds, 0.0))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60}:{s % 60:02d} min"
    if s < 86_400:
        return f"{s // 3600}:{s % 3600 // 60:02d} h"
    return f"{s // 86_400} d {s % 86_400 // 3600} h"
