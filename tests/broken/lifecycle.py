"""Mistakes in failures and in what is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.distributed as dist

from . import plans
from .catalogue import STAGES, mistake
from .parallel import Stages
from .right import Replicated

kept = []
#: Filled by the process that launches the ranks.
settings = {} if multiprocessing.parent_process() else {"steps": 4}


@mistake("processes.spawn")
class SetUpByLauncher(Replicated):
    """A global is filled in the launching process only; ranks that are spawned do not have it."""

    def prepare(self, job):
        if "steps" not in settings:
            raise LookupError("nobody has filled the settings here")
        return super().prepare(job)


@mistake("processes.overhead")
class CallsItsOwnHooks(Replicated):
    """Gradients are asked for twice a step, once by the strategy itself."""

    def optimizer_step(self, prepared, apply):
        self.gradients(prepared)
        return super().optimizer_step(prepared, apply)


@mistake("processes.metrics")
class FactsOfAnotherType(Replicated):
    """A fact for the result is a number of numpy's, which JSON has no place for."""

    def prepare(self, job):
        return attrs.evolve(super().prepare(job), facts={"buckets": np.int64(4)})


@mistake("processes.groups")
class LeakedGroup(Replicated):
    """A process group of the strategy's own is never destroyed."""

    def prepare(self, job):
        kept.append(dist.new_group())
        return super().prepare(job)


@mistake("processes.threads")
class LeakedThread(Replicated):
    """A thread waits for work for ever."""

    def prepare(self, job):
        threading.Thread(target=threading.Event().wait, name="prefetch", daemon=True).start()
        return super().prepare(job)


@mistake("processes.files")
class LeakedFile(Replicated):
    """A log file is never closed."""

    def prepare(self, job):
        kept.append(os.open(os.devnull, os.O_WRONLY))
        return super().prepare(job)


@mistake("failures.exception")
class ExceptionsSwallowed(Replicated):
    """The sync context swallows what goes wrong inside."""

    @contextlib.contextmanager
    def micro_batch(self, prepared, micro):
        with contextlib.suppress(Exception), super().micro_batch(prepared, micro):
            yield


@mistake("failures.nonfinite")
class UpdatedInBackward(Replicated):
    """The optimizer steps after the last backward, before core has looked at the gradients."""

    def backward(self, prepared, loss):
        super().backward(prepared, loss)
        if prepared.module.armed:
            prepared.optimizer.step()

    def optimizer_step(self, prepared, apply):
        return super().optimizer_step(prepared, apply=False)


@mistake("failures.nonfinite_gradient")
class NonFiniteSwallowed(Replicated):
    """What is not finite in a gradient becomes 0, and nobody hears of it."""

    def _reduce(self, prepared):
        for parameter in prepared.trainable:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        super()._reduce(prepared)


@mistake("failures.skipped_update")
class SkippedGradientsStay(Replicated):
    """Where an update is left out its gradients are not cleared."""

    def optimizer_step(self, prepared, apply):
        if apply:
            super().optimizer_step(prepared, apply)
        return apply


@mistake("failures.stop")
class LeavesOnSignal(Replicated):
    """A signal handler of the strategy's own ends the rank at once."""

    def prepare(self, job):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return super().prepare(job)


@mistake("failures.killed")
class HelperOutlives(Replicated):
    """A process of the strategy's own lives on when its rank is killed."""

    def prepare(self, job):
        kept.append(subprocess.Popen(["sleep", "20"], start_new_session=True))
        return super().prepare(job)

    def close(self, prepared):
        for helper in kept:
            helper.kill()
            helper.wait()


class OncePerProcess(Stages):
    """A pipeline that works once in a process only."""

    def prepare(self, job):
        if kept:
            raise RuntimeError("it can run once in a process")
        kept.append(job)
        return super().prepare(job)


class Hangs(Replicated):
    """In its second step the last rank waits for something that never comes."""

    def __init__(self):
        self._steps = 0

    def optimizer_step(self, prepared, apply):
        self._steps += 1
        if self._steps == 2 and dist.get_rank() == dist.get_world_size() - 1:
            self._wait_for_ever()
        return super().optimizer_step(prepared, apply)

    def _wait_for_ever(self):
        threading.Event().wait()


@mistake("processes.second_trial")
class ModelKeptForNextTrial(Replicated):
    """The model is made once for all trials, so that the second goes on with trained weights."""

    def _core(self, job):
        if job.config.repeat == 1:
            return super()._core(job)
        if not kept:
            kept.append(super()._core(job))
        return kept[0]


@mistake("processes.result", right=STAGES, plan=plans.stages)
class ParametersOfOneStage(Stages):
    """The model is not built by core, which can count the parameters of this rank's part only."""

    def _build(self, job):
        with torch.device("meta"):
            return job.model.build()


@mistake("processes.memory")
class GradientsKept(Replicated):
    """A copy of every step's gradients is kept."""

    def optimizer_step(self, prepared, apply):
        kept.append([parameter.grad.clone() for parameter in prepared.trainable])
        return super().optimizer_step(prepared, apply)


@mistake("processes.surroundings")
class DirectoryChanged(Replicated):
    """The process works in another directory from then on."""

    def prepare(self, job):
        os.chdir("/")
        return super().prepare(job)


@mistake("processes.surroundings")
class FileLeftBehind(Replicated):
    """A log is written to wherever the command was started."""

    def prepare(self, job):
        Path(f"debug-{job.ctx.rank}.log").write_text("prepared\n")
        return super().prepare(job)


@mistake("processes.surroundings")
class EnvironmentChanged(Replicated):
    """A variable of the environment, which later trials and libraries read, is set and stays."""

    def prepare(self, job):
        os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
        return super().prepare(job)


@mistake("processes.surroundings")
class HandlerKept(Replicated):
    """A signal is ignored from then on."""

    def prepare(self, job):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        return super().prepare(job)
