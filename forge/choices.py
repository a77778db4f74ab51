"""What a run takes by measurement: dtype, attention, threads, compile. Found once, remembered, kept in its config.

On a CPU and on an Apple GPU the candidates take training steps of the model's own shape, two layers deep; on an NVIDIA GPU
the choice is a rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from forge import machine, plan
from forge.config import Config, Interrupted, ModelConfig, RequestError, TrainConfig, nearest
from forge.memory import Memory, processor_name
from forge.model.transformer import Transformer, init_weights
from forge.ops.attention import BACKENDS, Case, able, distance, fastest, passing, tuned, verdict, verdicts

Say = Callable[[str], None]

TRIAL_TOKENS = 2048     # in a trial step, or one window
TRIAL_S = 0.7           # for each candidate, or three steps
BETTER = 0.95           # a candidate takes over when it needs less than this part of the time
COMPILE_S = 20          # what compiling takes with an empty cache ...
COMPILE_GAIN = 0.25     # ... and the part of a step that it usually saves (docs/RESULTS.md)
TUNE_S = 45             # what measuring the tiles of attention takes on a GPU, once, ...
TUNE_GAIN = 0.02        # ... and the part of a step that it may save
GPU_RATE = 0.4          # what a step reaches of the rate of a matrix product


def require(c: Config, device: torch.device) -> None:
    """Raises RequestError for what was asked for and cannot be had here, as far as no text need be read to tell."""
    t = c.train
    if t.compile and not machine.compiler():
        raise RequestError("--train.compile True: no C++ compiler is here (g++ or clang++, or the one that CXX names); "
                           "install one, or leave it out and train uncompiled")
    if t.fp8 and (reason := machine.without_fp8(device)):
        raise RequestError(f"--train.fp8: {reason}; leave it out")
    if (name := t.attention.split(" ")[0]) not in ("auto", *BACKENDS):
        raise RequestError(f"--train.attention {name}: there is no such backend; {nearest(name, ['auto', *BACKENDS])}")


def choose(c: Config, device: torch.device, mask: bool, say: Say) -> Config:
    """The config with device, dtype, threads, compile, attention, micro-batch and recomputation filled in, each with its
    reason.

    mask: whether windows hold several documents. Raises RequestError for an attention that cannot be had; `require` comes
    before.
    """
    m, t = c.model, c.train
    compiler = machine.compiler()
    first = "bfloat16" if t.dtype == "auto" and device.type == "cuda" else "float32" if t.dtype == "auto" else t.dtype
    fits = case(m, device, first, mask)
    if t.attention != "auto":
        require_backend(t.attention, fits)
    start = replace(t, device=device.type, dtype=first, threads=torch.get_num_threads(),  # type: ignore[arg-type]
                    compile=compiler is not None if t.compile is None else t.compile)
    fitting, room = plan.fit(replace(c, train=start), device)
    start = replace(fitting.train, attention=t.attention if t.attention != "auto" else on_gpu(c, fits)
                    if device.type == "cuda" else passing(fits)[0])
    chosen, why = (start, "") if device.type == "cuda" else by_trial(c, start, mask)
    if chosen.compile:
        compiled = "compiled"
    elif t.compile is False or compiler:
        compiled = "not compiled"
    else:
        compiled = ("not compiled: no C++ compiler is here; with one (apt install g++) a step takes three quarters of "
                    "the time")
    dtype = chosen.dtype + " and fp8" * chosen.fp8
    say(f"device: {chosen.device}, {chosen.threads} thread{'s' * (chosen.threads > 1)}, {dtype}, {compiled}{why}")
    found = verdicts(case(m, device, chosen.dtype, mask))
    refused = "; ".join(f"{name}: {reason}" for name, reason in found.items() if reason)
    say(f"attention: {chosen.attention}" + (f" ({refused})" if refused else ""))
    if m.window and m.window >= m.seq_len:
        say(f"note: model.window={m.window} hides no key from {m.seq_len} tokens, and rules out backends without one")
    sequences = t.batch_tokens // m.seq_len
    say(f"model: {m.n_layers} layers of width {m.dim}, {m.n_heads} heads of {m.head_dim}, MLP of {m.ffn_dim}, "
        f"{m.parameters:,} parameters, {m.flops_per_token() / 1e6:,.0f} MFLOP a token")
    say(f"batch: {t.batch_tokens:,} tokens a step = {sequences} window{'s' * (sequences > 1)} of {m.seq_len}"
        + (f", {chosen.micro_batch} at a time" if chosen.micro_batch != sequences else "")
        + {"none": "", "selective": ", the MLPs recomputed in the backward",
           "full": ", every block recomputed in the backward"}[chosen.recompute])
    say(f"memory: {room}")
    return replace(c, train=chosen)


def case(m: ModelConfig, device: torch.device, dtype: str, mask: bool) -> Case:
    """What training asks of attention."""
    windowed = any(m.layer_window(layer) for layer in range(m.n_layers))
    return Case(device.type, getattr(torch, dtype), m.head_dim, m.n_heads != m.n_kv_heads, square=True,
                single=m.seq_len == 1, causal=True, window=windowed, starts=mask, softcap=False, lse=False)


def on_gpu(c: Config, case: Case) -> str:
    """The backend that is fastest at the run's own shape; of a long run with tiles measured for it."""
    m, t = c.model, c.train
    with machine.deterministic(t.deterministic):
        name = fastest(case, m.seq_len, m.n_heads, m.n_kv_heads)
        planned_s = 60 * t.minutes if t.minutes else (
            m.flops_per_token() * (t.tokens or (t.steps or 0) * t.batch_tokens) / (GPU_RATE * machine.matmul_flops(
                torch.device(case.device), case.dtype, seconds=0.1)))
        if name == "triton" and planned_s * TUNE_GAIN > TUNE_S:
            name = tuned(case, m.seq_len, m.n_heads, m.n_kv_heads)
    return name


def require_backend(name: str, case: Case) -> None:
    """Raises RequestError unless the backend can do this and passes its probe here."""
    if reason := verdict(name.split(" ")[0], case):
        raise RequestError(f"--train.attention {name}: {reason}; leave it out, or name another of {able(*case)}")


def by_trial(c: Config, start: TrainConfig, mask: bool) -> tuple[TrainConfig, str]:
    """The settings of the fastest trial step, and what was measured. What the user named (c.train) is not tried against
    others; what is left is settled one after the other: dtype, attention, threads, compile."""
    m, t = c.model, c.train
    memory = Memory(f"{start.device}, {processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
                            f"deterministic {t.deterministic}, mask {mask}, {asdict(m) | {'n_layers': 2}}")
    seen: dict[str, float] = {}

    def step_ms(s: TrainConfig, compiled: bool = False) -> float:
        name = f"{s.dtype}, {s.attention}, {s.threads} thread{'s' * (s.threads > 1)}" + ", compiled" * compiled
        seen[name] = memory(f"{name}, {s.micro_batch} windows" if compiled else name,
                            lambda: 1000 * trial_s(m, s, mask, compiled))
        return seen[name]

    best, best_ms = start, step_ms(start)

    def better(*others: TrainConfig) -> bool:
        nonlocal best, best_ms
        before = best_ms
        for other in others:
            if (ms := step_ms(other)) < BETTER * best_ms:
                best, best_ms = other, ms
        return best_ms < before

    if t.dtype == "auto":
        better(replace(best, dtype="bfloat16"))
    if t.attention == "auto":
        names = passing(case(m, torch.device(best.device), best.dtype, mask))
        better(*(replace(best, attention=name) for name in names if name != best.attention))
    while best.device == "cpu" and not t.threads and best.threads > 1 and better(replace(best, threads=best.threads // 2)):
        pass
    why = ""
    if t.compile is None and best.compile and best.device == "mps" and (fault := compiled_fault(m, best, mask)):
        best, why = replace(best, compile=False), f": {fault}"
    elif t.compile is None and best.compile:
        m2 = replace(m, n_layers=min(2, m.n_layers))
        tokens = (t.batch_tokens / trial_rows(m, best) / m.seq_len) * m.flops_per_token() / m2.flops_per_token()
        planned_s = (min(x for x in (t.minutes and 60 * t.minutes, t.steps and t.steps * tokens * best_ms / 1000,
                                     t.tokens and t.tokens / t.batch_tokens * tokens * best_ms / 1000) if x))
        if planned_s * COMPILE_GAIN < COMPILE_S:
            best, why = replace(best, compile=False), f": it saves no time in a run of about {planned_s:.0f} s"
        else:
            eager_ms = memory(f"{best.dtype}, {best.attention}, {best.threads} threads, {best.micro_batch} windows",
                              lambda: 1000 * trial_s(m, best, mask, False, best.micro_batch))
            try:
                compiled_ms = step_ms(best, compiled=True)
            except (TorchDynamoException, InductorError) as error:
                best, why = replace(best, compile=False), f": {failed(error)}"
            else:
                seen["the same, not compiled"] = eager_ms
                if compiled_ms >= eager_ms:
                    best, why = replace(best, compile=False), ": it is no faster"
    figures = "; ".join(f"{name} {ms:.3g} ms" for name, ms in seen.items())
    return best, f"{why} (measured on two layers: {figures})" if len(seen) > 1 else why


def trial_rows(m: ModelConfig, t: TrainConfig) -> int:
    return min(t.micro_batch, max(1, TRIAL_TOKENS // m.seq_len))


def trial_s(m: ModelConfig, t: TrainConfig, mask: bool, compiled: bool, rows: int = 0) -> float:
    """Seconds of a forward and backward of two layers as these settings have it: the best of some, after one that
    does not count. A compiled one has the run's own shape, so that the run finds it compiled."""
    before = torch.get_num_threads()
    torch.set_num_threads(t.threads)
    try:
        model = trial_model(m, t)
        inputs, starts = trial_batch(m, t, mask, rows or (t.micro_batch if compiled else trial_rows(m, t)))
        device = inputs.device
        best, began, steps = float("inf"), time.perf_counter(), -1
        with machine.deterministic(t.deterministic):
            if compiled:
                model.compile_parts()
            while steps < 3 or (steps < 30 and time.perf_counter() - began < TRIAL_S):
                at = time.perf_counter()
                model(inputs, inputs, starts).backward()
                model.zero_grad()
                machine.wait(device)
                if steps >= 0:
                    best = min(best, time.perf_counter() - at)
                else:
                    began = time.perf_counter()
                steps += 1
        return best
    finally:
        torch.set_num_threads(before)


def failed(error: BaseException) -> str:
    """What a compiler's error says at its root. A signal that came while it compiled goes on."""
    while (cause := error.__cause__ or error.__context__) is not None:
        if isinstance(cause, Interrupted | KeyboardInterrupt):
            raise cause from None
        error = cause
    return f"the compiler failed ({(str(error).splitlines() or [type(error).__name__])[0]})"


def trial_model(m: ModelConfig, t: TrainConfig) -> Transformer:
    """Two layers of the model, on the device."""
    with torch.device("meta"):
        model = Transformer(replace(m, n_layers=min(2, m.n_layers)), getattr(torch, t.dtype), t.attention)
    model.to_empty(device=t.device).train()
    init_weights(model, 0)
    return model


def trial_batch(m: ModelConfig, t: TrainConfig, mask: bool, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    inputs = torch.randint(m.vocab_size, (rows, m.seq_len), generator=torch.Generator().manual_seed(0)).to(t.device)
    return inputs, torch.zeros_like(inputs, dtype=torch.int32) if mask else None


def compiled_fault(m: ModelConfig, t: TrainConfig, mask: bool) -> str | None:
    """What keeps a run from being compiled on a device whose compiler is young: it fails, or a step's loss or gradients come
    out otherwise than uncompiled. None: they agree."""
    allowed = {"float32": 1e-3, "bfloat16": 5e-2}[t.dtype]
    model = trial_model(replace(m, dropout=0.0), t)
    inputs, starts = trial_batch(m, t, mask, trial_rows(m, t))

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(inputs, inputs, starts)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    with machine.deterministic(t.deterministic):
        exact = step()
        model.compile_parts()
        try:
            found = step()
        except Exception as error:      # whatever a compiler raises
            return failed(error)
    for off in (distance(x, y) for x, y in zip(found, exact)):
        if not off <= allowed:      # nor if it is no number
            return f"compiled, a step is off by {off:.1e} of the uncompiled, {allowed:.0e} is allowed"
    return None
