"""forge bench: how fast this machine trains and writes, by the loop that trains and the code that writes."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity

from forge import machine, plan
from forge.config import Config, Interrupted, RequestError, load_json
from forge.generate import ROWS, Row, next_logits
from forge.model.transformer import Transformer, init_weights
from forge.training import train

WARM_STEPS = 3
PROFILED_STEPS = 4
BUDGET_STEPS = 100_000      # as a long run would choose, of which only the first steps are taken
SMALL_PRESETS = ("shakespeare", "gpt-10m")       # the others are made for a large vocabulary


class Enough(Exception):
    """The steps to be measured are done."""


def bench_train(config: Config, *, steps: int = 20, profile: bool = False) -> dict[str, Any]:
    """{measured, config, environment} of a training run that is broken off after some steps; with profile also
    {profile: {part: (ms of a step, share)}} and, on a GPU, {kernels: the longest}.

    The run is that of forge.training.train, in a folder that is removed; a preset made for a large vocabulary takes
    GPT-2's tokenizer. Raises RequestError as train does.
    """
    if config.data.tokenizer is None and not config.data.text and config.preset not in SMALL_PRESETS:
        config = replace(config, data=replace(config.data, tokenizer="gpt2"))
    last = WARM_STEPS + steps + (PROFILED_STEPS if profile else 0) + 2      # the last two leave no record
    config = replace(config, train=replace(config.train, steps=BUDGET_STEPS, tokens=None, minutes=None, eval_every=0,
                                           sample_every=0, save_every=0))
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *(
        [ProfilerActivity.CUDA] if torch.cuda.is_available() else [])])
    counted, before = 0, 0.0
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal counted, before
        if not isinstance(optimizer, torch.optim.AdamW):        # each step ends with AdamW's
            return
        counted += 1
        if profile and counted == last - PROFILED_STEPS:
            synchronize()
            profiler.start()
            before = time.perf_counter()
        if counted == last:
            synchronize()
            raise Enough

    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        hook = register_optimizer_step_post_hook(after_step)
        spoken = io.StringIO()
        print(f"bench: {last} steps of the preset {config.preset} ...", file=sys.stderr)
        try:
            with contextlib.redirect_stdout(spoken), contextlib.suppress(Enough):
                train(config, run=run)
        except Interrupted as error:
            raise Interrupted("stopped; nothing is kept", error.exit_code - 128) from None
        finally:
            hook.remove()
        profiled_s = time.perf_counter() - before
        if profile:
            profiler.stop()
        config = load_json(run / "config.json")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in spoken.getvalue().splitlines():
        if line.startswith(("device:", "attention:", "model:", "batch:")):
            print(line)
    device = torch.device(config.train.device)
    ms = sorted(r["step_ms"] for r in records[WARM_STEPS:WARM_STEPS + steps])
    median = statistics.median(ms)
    tokens_per_s = 1000 * config.train.batch_tokens / median
    flops = config.model.flops_per_token() * tokens_per_s
    product = machine.matmul_flops(device, getattr(torch, config.train.dtype))
    stated = machine.peak_flops(config.train.dtype)
    measured = {
        "tokens per s": tokens_per_s, "step ms": median, "fastest step ms": ms[0], "slowest step ms": ms[-1],
        "compile s": max(0.0, (records[0]["step_ms"] - median) / 1000) if config.train.compile else 0.0,
        "TFLOP/s": flops / 1e12,
        f"MFU, % of the maker's {config.train.dtype} peak": 100 * flops / stated if stated else "unknown",
        f"of a {config.train.dtype} product's TFLOP/s": product / 1e12, "share of it, %": 100 * flops / product,
        "peak memory GB": peak_memory(device) / 1e9, "planned memory GB": sum(plan.memory(config).values()) / 1e9}
    result: dict[str, Any] = {"measured": measured}
    if profile and device.type == "cuda":
        result["profile"] = gpu_parts(profiler.events() or [], PROFILED_STEPS)
        result["kernels"] = kernels(profiler.events() or [], PROFILED_STEPS)
    elif profile:
        result["profile"] = cpu_parts(profiler.events() or [], 1000 * profiled_s / PROFILED_STEPS)
    return result | {"config": asdict(config), "environment": machine.environment(device)}


MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise", "mkl::_mkl_linear")
ATTENTION_KERNELS = ("forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel", "split_kernel", "flash", "fmha", "sdpa")
MATMUL_KERNELS = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitK")


def part_of(event: FunctionEvent) -> str:
    """Which part of a step an operation belongs to, by its name and those of the operations that called it."""
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith("Optimizer."):
            return "optimizer: " + above.name.split("#")[1].split(".")[0]
        if "linear_cross_entropy" in above.name:
            return "head and loss"
        if "attention" in above.name.lower():
            return "attention"
        above = above.cpu_parent
    if event.name in MATMULS:
        return "matrix products of the layers"
    if "Compiled" in event.name:
        return "compiled: norms, rope, activations, sums"
    if "foreach" in event.name or "norm" in event.name:
        return "gradient norm and clipping" if "foreach" in event.name else "norms"
    return "other operations"


def cpu_parts(events: Iterable[FunctionEvent], step_ms: float) -> dict[str, tuple[float, float]]:
    """{part: (ms of a step, its share)}, largest first; what no operation accounts for is Python, data and waiting."""
    ms: dict[str, float] = {}
    for event in events:
        ms[part_of(event)] = ms.get(part_of(event), 0.0) + event.self_cpu_time_total / 1000 / PROFILED_STEPS
    ms["Python, data, waiting"] = max(0.0, step_ms - sum(ms.values()))
    whole = max(step_ms, sum(ms.values()))
    return {name: (part, part / whole) for name, part in sorted(ms.items(), key=lambda item: -item[1])}


def gpu_parts(events: Sequence[FunctionEvent], steps: int) -> dict[str, tuple[float, float]]:
    """{part: (ms of a step, its share)}, largest first, and when the GPU had nothing to do. Times are of the GPU."""
    done = on_gpu(events)
    ranges = [e.time_range for e in events if e.device_type == DeviceType.CUDA and e.name.startswith("Optimizer.step")]
    us: dict[str, float] = defaultdict(float)
    busy, end = 0.0, done[0].time_range.start
    for e in done:
        at = e.time_range
        if any(r.start <= at.start and at.end <= r.end for r in ranges):
            part = "optimizer"
        elif any(word in e.name for word in ATTENTION_KERNELS):
            part = "attention"
        elif any(word in e.name for word in MATMUL_KERNELS):
            part = "matrix products"
        elif "loss_kernel" in e.name:
            part = "loss"
        elif "activation" in e.name:
            part = "activations"
        elif e.name.startswith("triton_"):
            part = "compiled: norms, rope, sums"
        else:
            part = "copies" if e.name.startswith("Mem") else "other kernels"
        us[part] += at.end - at.start
        busy += max(0.0, at.end - max(at.start, end))
        end = max(end, at.end)
    whole = end - done[0].time_range.start
    us["idle"] = whole - busy
    return {name: (part / 1000 / steps, part / whole) for name, part in sorted(us.items(), key=lambda item: -item[1])}


def on_gpu(events: Sequence[FunctionEvent]) -> list[FunctionEvent]:
    """What ran on the GPU, in its order."""
    return sorted((e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation),
                  key=lambda e: e.time_range.start)


def kernels(events: Sequence[FunctionEvent], steps: int, most: int = 40) -> list[tuple[str, float, float]]:
    """(kernel, ms of a step, calls of a step), the longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for e in on_gpu(events):
        found[e.name[:100]].append(e.time_range.end - e.time_range.start)
    rows = ((name, sum(us) / 1000 / steps, len(us) / steps) for name, us in found.items())
    return sorted(rows, key=lambda row: -row[1])[:most]


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU what torch took of it, on a CPU what the process did. What a recorded step needs stays taken between
    its replays, and torch does not count it as allocated then."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def bench_generate(config: Config, *, prompt_tokens: int = 128, new_tokens: int = 64, batches: Sequence[int] = (1, 8),
                   dtypes: Sequence[str] = ("float32", "bfloat16"), device: str = "auto") -> dict[str, Any]:
    """{measured: a row for each dtype and batch, environment}: tokens a second of reading prompts and of writing.

    The model has the preset's shape and random weights. Raises RequestError for numbers that do not fit.
    """
    m = replace(config.model, vocab_size=config.model.vocab_size or 32_768).resolve()
    if min(prompt_tokens, new_tokens, *batches) < 1 or prompt_tokens + new_tokens > m.seq_len or max(batches) > ROWS:
        raise RequestError(f"{prompt_tokens} prompt tokens and {new_tokens} new ones in batches of {tuple(batches)}: each "
                           f"is at least 1, together the tokens fit into the context of {m.seq_len}, and a batch holds at "
                           f"most {ROWS}")
    place = machine.pick_device(device)
    machine.settle_cpu()
    rows = []
    for dtype in dtypes:
        with torch.device("meta"):
            model = Transformer(m, getattr(torch, dtype))
        model.to_empty(device=place).eval()
        init_weights(model, 0)
        with model.packed(ROWS):
            for batch in batches:
                random = torch.Generator().manual_seed(0)
                prompts = torch.randint(m.vocab_size, (batch, prompt_tokens), generator=random).tolist()
                speeds = []
                for _ in range(3):      # the best of three
                    texts = [Row(list(prompt)) for prompt in prompts]
                    took = []
                    for _ in range(new_tokens):
                        began = time.perf_counter()
                        for row, token in zip(texts, next_logits(model, texts).argmax(1).tolist()):
                            row.ids.append(token)
                        took.append(time.perf_counter() - began)
                    speeds.append((batch * prompt_tokens / took[0], batch * (new_tokens - 1) / sum(took[1:])
                                   if new_tokens > 1 else 0.0))
                print(f"bench: {dtype}, {batch} texts ...", file=sys.stderr)
                rows.append({"dtype": dtype, "batch": batch, "prompt_tokens_per_s": max(s[0] for s in speeds),
                             "new_tokens_per_s": max(s[1] for s in speeds)})
    return {"measured": rows, "preset": config.preset, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens,
            "environment": machine.environment(place)}
