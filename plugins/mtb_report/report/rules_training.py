"""Rules for training runs. Each is a pure function of the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from mtb_report.results import Record

from .findings import Finding, known, text_of
from .scaling import is_plain, setting
from .trainings import interval, memory_spread

#: What is normal, by experience with data-parallel training: waiting for data below 2% of the step.
DATA_SHARE = 0.02
OPTIMIZER_SHARE = 0.3
GAP_SHARE = 0.05
WIDE_INTERVAL = 0.05
FEW_STEPS = 10
NORM_PEAK = 10.0
FAR_FROM_LN = 0.5
#: Bytes of fp32 weight, gradient and AdamW's two moments, for each parameter.
ADAMW_BYTES = 16


def training(record: Record) -> Iterator[Finding]:
    """Everything that the rules say of a training run."""
    for rule in _RULES:
        yield from rule(record)


def _what_ran(record: Record) -> Iterator[Finding]:
    ranks, parameters = known(record, "world_size"), known(record, "parameters")
    where = text_of(record, "device_name") or text_of(record, "device") or "an unknown device"
    model = f"a model of {parameters:,} parameters" if parameters else "a model of unknown size"
    on = f"{ranks:g} rank{'' if ranks == 1 else 's'}" if ranks else "an unknown number of ranks"
    steps, warmup = known(record, "steps"), known(record, "warmup_steps")
    counted = " It is not known how many steps were measured" if steps is None else f" {_measured(steps)}"
    after = f", after {warmup:g} of warm-up that do not count." if warmup else "."
    name = text_of(record, "strategy") or "An unknown strategy"
    yield Finding(
        "meaning",
        "what-ran",
        f"Strategy {name} trained {model} on {on} ({where}) in {text_of(record, 'precision') or 'unknown precision'}.{counted}{after}",
    )


def _measured(steps: float) -> str:
    if steps < 2:
        return "One step was measured" if steps else "No step was measured"
    return f"{steps:g} steps were measured"


def _speed(record: Record) -> Iterator[Finding]:
    time, rate, ranks = (known(record, name) for name in ("step_time_ms", "tokens_per_sec", "world_size"))
    if not time or not rate:
        why = "" if known(record, "steps") == 0 else ": the time of a step is not known"
        yield Finding("meaning", "speed", f"It holds no speed{why}.")
        return
    per_rank = f", {rate / ranks:,.0f} for each rank" if ranks and ranks > 1 else ""
    samples, length = known(record, "global_batch_size"), setting(record, "seq_length")
    batch = f" of {samples:g} sequences of {length:g} tokens" if samples and length else ""
    yield Finding(
        "meaning",
        "speed",
        f"An optimizer step{batch} takes {time:,.2f} ms on the slowest rank, so the job handles {rate:,.0f} tokens a second{per_rank}.",
        performance=True,
    )


def _certainty(record: Record) -> Iterator[Finding]:
    found = interval(record, "tokens_per_sec")
    rate = known(record, "tokens_per_sec")
    if not rate:
        return
    if found is None:
        several = (
            max((record.summary.get("tokens_per_sec") or {}).get("n") or 1, known(record, "repeat_count") or 1) > 1
        )
        several |= (record.summary.get("tokens_per_sec") or {}).get("std_kind") == "population"
        why = "There was a single trial"
        if several:
            why = "Several trials were planned or made, but the file does not hold the figures of two"
        yield Finding(
            "unusual",
            "single-trial",
            f"{why}, so the noise is not known: no difference to another run can be told from it.",
        )
        again = "from its start, without checkpoints, " if _keeps_checkpoints(record) else ""
        yield Finding(
            "next",
            "repeat",
            f"Measure it again {again}with --repeat 5; `mtb compare` then says how small a difference it can see.",
        )
        return
    low, high, count = found
    share = (high - low) / 2 / rate
    if high == low:
        yield Finding(
            "unusual",
            "no-spread",
            f"All {count} trials have the same figure, which is not how measurements look: the noise is not known.",
            performance=True,
        )
        return
    yield Finding(
        "meaning",
        "certainty",
        f"Over {count} independent trials the mean throughput is known to ±{share:.1%} (95% confidence); a smaller difference to another run means nothing.",
        performance=True,
    )
    if share > WIDE_INTERVAL:
        yield Finding(
            "unusual",
            "wide-interval",
            f"That interval is wide: ±{share:.1%}; trials of a quiet machine agree within {WIDE_INTERVAL:.0%}.",
            performance=True,
        )
        yield Finding(
            "next",
            "more-trials",
            "Take more trials or more steps, and look for other work on the machine.",
            performance=True,
        )


def _keeps_checkpoints(record: Record) -> bool:
    """Whether it was resumed or saved checkpoints, which repeated trials cannot."""
    runtime = record.get("runtime") or {}
    return bool(
        runtime.get("resumed", runtime.get("resume")) or runtime.get("checkpoint_dir") or setting(record, "save_every")
    )


def _parts(record: Record) -> Iterator[Finding]:
    whole = known(record, "step_time_ms")
    data, passes, optimizer = (known(record, n) for n in ("data_time_ms", "forward_backward_ms", "optimizer_step_ms"))
    if not whole or data is None or passes is None or optimizer is None:
        return
    gap = whole - data - passes - optimizer
    yield Finding(
        "meaning",
        "parts",
        f"Of the step, {passes / whole:.0%} is forward and backward with the synchronisation of gradients, {optimizer / whole:.0%} the optimizer, {data / whole:.1%} waiting for data.",
        performance=True,
    )
    if data / whole > DATA_SHARE:
        yield Finding(
            "unusual",
            "data-wait",
            f"Waiting for data takes {data / whole:.1%} of the step; below {DATA_SHARE:.0%} is normal.",
            performance=True,
        )
        advice = "Run the same with --data synthetic: if it is faster, the data path is what to repair first."
        if setting(record, "data") == "synthetic":
            advice = (
                "The data is synthetic already, so no file is slow: see whether other work takes the cores, and whether "
                "the step is so short that making a batch shows (a larger model, or profile it)."
            )
        yield Finding("next", "data-path", advice, performance=True)
    if optimizer / whole > OPTIMIZER_SHARE:
        yield Finding(
            "unusual",
            "optimizer-share",
            f"The optimizer takes {optimizer / whole:.0%} of the step, which is much: the batch is small for this model.",
            performance=True,
        )
        yield Finding(
            "next",
            "larger-batch",
            "Try a larger --batch-size or more --grad-accum-steps: the optimizer's time is paid once a step.",
            performance=True,
        )
    if gap / whole > GAP_SHARE:
        yield Finding(
            "unusual",
            "gap",
            f"{gap / whole:.1%} of the step is in none of its parts: each part is the slowest rank's, so ranks are slow in different parts.",
            performance=True,
        )


def _memory(record: Record) -> Iterator[Finding]:
    peak, parameters = known(record, "max_memory_mib"), known(record, "parameters")
    if not peak:
        return
    kind = text_of(record, "memory_kind")
    what = {
        "cuda_allocated": "what torch's allocator had handed out at the peak",
        "process_rss": "the process's peak resident set, libraries and the data included, so it says little about the model alone",
    }.get(kind or "", "by a measure that is not recorded")
    text = f"The fullest rank needed {peak:,.0f} MiB: {what}."
    if parameters and is_plain(record) and kind == "cuda_allocated" and setting(record, "optimizer") in (None, "adamw"):
        state = parameters * ADAMW_BYTES / 2**20
        text += f" Weights, gradients and AdamW's moments in fp32 are {state:,.0f} MiB of it; the rest is activations and buffers."
    yield Finding("meaning", "memory", text, performance=True)
    spread = memory_spread(record)
    if spread is not None:
        yield Finding(
            "unusual",
            "memory-spread",
            f"The peak differs between trials, {spread[0]:,.0f} to {spread[1]:,.0f} MiB, and the figure is their mean: a trial may "
            "have held what an earlier one left, so no memory is saved or lost by such a difference.",
            performance=True,
        )


def _communication(record: Record) -> Iterator[Finding]:
    moved, parameters, ranks = (
        record.get("comm_bytes_per_step"),
        known(record, "parameters"),
        known(record, "world_size"),
    )
    if not isinstance(moved, dict) or not moved or not ranks or ranks < 2:
        return
    total = sum(moved.values())
    per = f", {total / parameters:.1f} for each parameter" if parameters else ""
    kinds = ", ".join(kind.replace("_", "-") for kind, size in sorted(moved.items(), key=lambda kv: -kv[1]) if size)
    yield Finding("meaning", "communication", f"In a step a rank hands {total:,} bytes to collectives ({kinds}){per}.")


def _mfu(record: Record) -> Iterator[Finding]:
    share, reason = known(record, "mfu"), text_of(record, "mfu_reason")
    if share is None:
        if reason and known(record, "steps") != 0:
            yield Finding("meaning", "mfu", f"How much of the device's peak was used (MFU) is not known: {reason}.")
        return
    convention = text_of(record, "flops_convention")
    yield Finding(
        "meaning",
        "mfu",
        f"The model's own arithmetic used {share:.1%} of the devices' peak (MFU{f', {convention} convention' if convention else ''}).",
        performance=True,
    )
    if share > 1:
        yield Finding(
            "unusual",
            "mfu-above-one",
            f"An MFU of {share:.0%} cannot be: the peak or the count of FLOPs is wrong.",
            performance=True,
        )


def _loss(record: Record) -> Iterator[Finding]:
    first, last = known(record, "loss_first"), known(record, "loss")
    flag = record.get("loss_nonfinite") or record.get("loss_first_nonfinite")
    if flag:
        yield Finding(
            "unusual",
            "loss-not-finite",
            f"The loss was {flag}: the training is broken from there on, and its speed tells nothing.",
        )
        tries = ["lower --learning-rate"]
        tries += [] if setting(record, "max_grad_norm") else ["set --max-grad-norm"]
        tries += [] if record.get("precision") == "fp32" else ["try --precision fp32"]
        listed = tries[0] if len(tries) == 1 else f"{', '.join(tries[:-1])} or {tries[-1]}"
        yield Finding("next", "find-nonfinite", f"Find the step in the metrics lines (`nonfinite`); {listed}.")
        return
    if first is None or last is None or known(record, "steps") == 0:
        return
    yield Finding("meaning", "loss", f"The loss went from {first:.4f} at its first step to {last:.4f} at its last.")
    if last > first:
        yield Finding(
            "unusual",
            "loss-rises",
            f"The loss rose by {last - first:.3f}: the training does not learn at these settings.",
        )
        ramp = "" if setting(record, "lr_warmup_steps") else ", or a warm-up of it (--lr-warmup-steps)"
        yield Finding("next", "lower-rate", f"Try a lower --learning-rate{ramp}.")
    vocabulary = setting(record, "vocab_size")
    fresh = not (record.get("runtime") or {}).get("resumed") and setting(record, "model") == "gpt"
    if fresh and vocabulary and abs(first - math.log(vocabulary)) > FAR_FROM_LN:
        yield Finding(
            "unusual",
            "first-loss",
            f"The first loss {first:.3f} is far from ln({vocabulary}) = {math.log(vocabulary):.3f}, with which an untrained model of this vocabulary begins.",
        )


def _gradients(record: Record) -> Iterator[Finding]:
    mean, highest = known(record, "grad_norm"), known(record, "grad_norm_max")
    clipped, skipped, steps = (known(record, name) for name in ("clipped_steps", "skipped_steps", "steps"))
    if mean and highest and highest > NORM_PEAK * mean:
        yield Finding(
            "unusual",
            "norm-peak",
            f"The gradient's norm reached {highest:.3g}, {highest / mean:.0f} times its mean {mean:.3g}: a spike.",
        )
    if clipped and steps and clipped / steps > 0.5:
        yield Finding(
            "unusual",
            "much-clipping",
            f"{clipped:g} of {steps:g} steps were clipped: the threshold, not the learning rate, sets the size of the update.",
        )
    if skipped:
        yield Finding(
            "unusual", "skipped", f"{skipped:g} steps made no update, because a loss or gradient was not finite."
        )


def _protocol(record: Record) -> Iterator[Finding]:
    steps, warmup = known(record, "steps"), known(record, "warmup_steps")
    resumed = (record.get("runtime") or {}).get("resumed")
    whole = record.status in (None, "success")
    if steps == 0:
        yield Finding("unusual", "no-step", "No step was measured: it says nothing of speed, memory or losses.")
        if resumed and whole:
            at = known(record, "global_step")
            there = f", step {at:g}," if at is not None else ""
            yield Finding(
                "next",
                "later-step",
                f"The checkpoint that it resumed from{there} was at the planned end already: name a later --until-step, "
                "or train from the start, without --resume.",
            )
        elif whole:
            yield Finding("next", "more-steps", "Measure at least 20 steps (--steps 20).")
        return
    if steps is not None and steps < FEW_STEPS:
        only = "a single step" if steps == 1 else f"{steps:g} steps"
        yield Finding(
            "unusual",
            "few-steps",
            f"Only {only} {'was' if steps == 1 else 'were'} measured; the mean of fewer than {FEW_STEPS} depends on chance.",
        )
        if whole:  # else it was to be more
            yield Finding("next", "more-steps", "Measure at least 20 steps (--steps 20).")
    if warmup == 0 and not resumed:
        yield Finding(
            "unusual",
            "no-warmup",
            "There was no warm-up: the first step, with allocations and first communication, is in the mean.",
        )
        yield Finding("next", "warm-up", "Add --warmup-steps 5.")


def _runtime(record: Record) -> Iterator[Finding]:
    runtime = record.get("runtime") or {}
    if runtime.get("restarts"):
        yield Finding("unusual", "restarts", f"The workers were restarted {runtime['restarts']} times after failures.")
    if runtime.get("resumed", runtime.get("resume")) and runtime.get("resume_deterministic") is False:
        reason = runtime.get("resume_determinism_reason")
        yield Finding(
            "unusual",
            "inexact-resume",
            f"It was resumed, but does not go on exactly as the interrupted run would have{f': {reason}' if reason else ''}.",
        )


def _next(record: Record) -> Iterator[Finding]:
    strategy, ranks = record.get("strategy"), known(record, "world_size")
    if not known(record, "step_time_ms") or record.status not in (None, "success"):
        return  # first it must be measured
    alike = (
        "" if _threads_are_set(record) else " With OMP_NUM_THREADS set for both, or threads are compared with ranks."
    )
    if ranks and ranks > 1:
        yield Finding(
            "next",
            "one-rank",
            "For the scaling efficiency run the same on one rank (--nproc 1; --strategy single where the strategy needs "
            f"more), and give both to `mtb report`.{alike}",
        )
        if strategy is not None and not is_plain(record):
            yield Finding(
                "next",
                "ddp-base",
                "Run the same with --strategy ddp and no options: what memory is saved, and what it costs in time, is "
                "against that.",
            )
        accumulated, mode = known(record, "gradient_accumulation_steps"), record.get("resolved_gradient_sync_mode")
        if accumulated and accumulated > 1 and mode == "every" and not _must_synchronise(record):
            yield Finding(
                "next",
                "sync-last",
                f"Gradients are synchronised after each of {accumulated:g} micro-batches; --gradient-sync-mode last does it once, for memory.",
            )
        yield Finding(
            "next",
            "profile",
            f"To see how much communication is exposed, and which rank is waited for: mtb profile --strategy {strategy or 'NAME'} with the same options.",
        )
    elif ranks == 1:
        how = "--strategy ddp --nproc 2" if strategy in ("single", None) else "--nproc 2"
        yield Finding(
            "next",
            "more-ranks",
            f"Run the same on more ranks ({how}): this is the base of the scaling efficiency.{alike}",
        )


def _threads_are_set(record: Record) -> bool:
    """Whether a rank has as many threads at every number of ranks; they do the work on a CPU only."""
    return record.get("device") != "cpu" or "OMP_NUM_THREADS" in (record.environment.get("variables") or {})


def _must_synchronise(record: Record) -> bool:
    """Whether the strategy can synchronise at every micro-batch only: DeepSpeed decides by stage; a static graph must."""
    return record.get("strategy") == "deepspeed" or bool((record.get("strategy_options") or {}).get("static_graph"))


_RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (
    _what_ran,
    _speed,
    _certainty,
    _parts,
    _memory,
    _communication,
    _mfu,
    _loss,
    _gradients,
    _protocol,
    _runtime,
    _next,
)
