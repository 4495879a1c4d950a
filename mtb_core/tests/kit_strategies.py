"""For tests of the conformance kit: a right data-parallel strategy, and one that has a single mistake for each check."""

import contextlib
import os
import signal
import socket
import subprocess
import threading

import attrs
import torch
import torch.distributed as dist

from mtb_core import Layout, NoOptions, Piece, Plan, Prepared, Shards, State, Strategy, StrategyInfo
from mtb_core.ckpt import opened, publish
from mtb_core.ckpt.image import Image
from mtb_core.ckpt.layout import READY
from mtb_core.testing.checking import Case, all_checks, run_case
from mtb_core.testing.lab import Lab


def plan(options, config, world):
    return Plan(Layout((("dp", world.size),)), sync_modes=("last",))


def lab_of(strategy):
    """A laboratory for a class of this module; not to be entered in a process that has threads of torch."""
    info = StrategyInfo(
        strategy.__name__.lower(), "", f"{__name__}:{strategy.__name__}", _PLANS.get(strategy, plan), NoOptions
    )
    return Lab(info, world_sizes=(1, 2))


def outcome_of(lab, name, ranks=2):
    """How the check `name` ends."""
    (check,) = (c for c in all_checks() if c.name == name)
    return run_case(lab, Case(check, ranks))


class Right(Strategy):
    """Replicas whose gradients are summed after the last micro-batch."""

    def prepare(self, job):
        core = job.in_place(job.materialize(job.build()))
        return Prepared(core, core, job.make_optimizer(core), {"job": job})

    @contextlib.contextmanager
    def micro_batch(self, prepared, micro):
        yield
        for parameter in prepared.trainable if micro.sync else ():
            dist.all_reduce(parameter.grad)

    def gradients(self, prepared):
        return [Shards([p.grad for p in prepared.trainable], copies=dist.get_world_size())]


def _changed(state, change):
    """`state` with every key and piece as `change(key, piece)` gives them."""
    pairs = [change(key, piece) for key, pieces in state.pieces.items() for piece in pieces]
    return State({key: [piece] for key, piece in pairs})


class Prefixed(Right):
    """A wrapper's prefix in the keys."""

    def state(self, prepared):
        return _changed(super().state(prepared), lambda key, p: (key.replace("/", "/module.", 1), p))


class Flattened(Right):
    """Flat tensors in place of whole ones."""

    def state(self, prepared):
        return _changed(
            super().state(prepared),
            lambda key, p: (key, Piece(p.tensor.view(-1), (p.tensor.numel(),), (0,))),
        )


class StaleMoments(Right):
    """Optimizer state is copied when it is first asked for."""

    def state(self, prepared):
        live = super().state(prepared)
        kept = prepared.engine.setdefault("kept", {})
        for key, (piece,) in live.pieces.items():
            if key.startswith("optim/"):
                kept.setdefault(key, Piece(piece.tensor.clone(), piece.shape, piece.offset))
        return State({**live.pieces, **{key: [piece] for key, piece in kept.items()}})


class Copies(Right):
    """The state is a copy, so that loading goes nowhere."""

    def state(self, prepared):
        return _changed(super().state(prepared), lambda key, p: (key, Piece(p.tensor.clone(), p.shape, p.offset)))


class OwnSchedule(Right):
    """The schedule is stepped once more after resuming."""

    def state_loaded(self, prepared, state):
        prepared.engine["resumed"] = True

    def optimizer_step(self, prepared, apply):
        if prepared.engine.pop("resumed", False):
            for group in prepared.optimizer.param_groups:
                group["lr"] *= 0.5
        return super().optimizer_step(prepared, apply)


class SeedsAlike(Right):
    """The random stream of every rank starts anew, alike, in every step."""

    def micro_batch(self, prepared, micro):
        torch.manual_seed(micro.index)
        return super().micro_batch(prepared, micro)


class HiddenState(Right):
    """Updates depend on something that no checkpoint holds."""

    def optimizer_step(self, prepared, apply):
        prepared.engine["count"] = count = prepared.engine.get("count", 0) + 1
        for parameter in prepared.trainable:
            parameter.grad *= 1 + 0.1 * count
        return super().optimizer_step(prepared, apply)


class SavesWorld(Right):
    """A tensor whose shape is the number of ranks is saved too."""

    def state(self, prepared):
        world = dist.get_world_size()
        own = prepared.engine.setdefault("world", torch.ones(world))
        return State({**super().state(prepared).pieces, "model/world": [Piece(own, (world,), (0,))]})


class Aliases(Right):
    """Keeps core from copying when a save begins: what is saved is read when it is written."""

    def prepare(self, job):
        stage, view = Image.stage, Image.view
        kept = {}

        def later(image):
            stage(image, kept[id(image)])
            return view(image)

        Image.stage = lambda image, tensors: kept.update({id(image): tensors})
        Image.view = later
        return super().prepare(job)


class OtherWhenAsynchronous(Right):
    """What is saved asynchronously is not what is saved synchronously."""

    def state(self, prepared):
        live = super().state(prepared)
        if not prepared.engine["job"].config.async_save:
            return live
        return _changed(live, lambda key, p: (key, Piece(p.tensor.detach() * 2, p.shape, p.offset)))


class MarksEarly(Right):
    """The mark READY is there before the data."""

    def prepare(self, job):
        create = publish.Workspace.create

        def marked(folder, step):
            workspace = create(folder, step)
            (workspace.path / READY).write_text("ready\n")
            return workspace

        publish.Workspace.create = staticmethod(marked)
        return super().prepare(job)


class ChecksNothing(Right):
    """Files are resumed from without a look at their digests."""

    def prepare(self, job):
        opened.Opened.check_files = lambda *_: None
        return super().prepare(job)


class StepsInBackward(Right):
    """The update comes before core has looked at the gradients."""

    def gradients(self, prepared):
        shards = super().gradients(prepared)
        prepared.optimizer.step()
        return shards

    def optimizer_step(self, prepared, apply):
        return super().optimizer_step(prepared, apply=False)


class KeepsGradients(Right):
    """Gradients are cleared after updates only."""

    def optimizer_step(self, prepared, apply):
        if apply:
            super().optimizer_step(prepared, apply)
        return apply


class Swallows(Right):
    """The sync context ends exceptions."""

    @contextlib.contextmanager
    def micro_batch(self, prepared, micro):
        with contextlib.suppress(Exception), super().micro_batch(prepared, micro):
            yield


class Helper(Right):
    """Starts a process that outlives a rank that is killed."""

    def prepare(self, job):
        subprocess.Popen(["sleep", "20"], start_new_session=True)
        return super().prepare(job)


class OwnHandler(Right):
    """Takes SIGTERM from core."""

    def prepare(self, job):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().prepare(job)


class LeaksGroup(Right):
    """Makes a process group and leaves it."""

    def prepare(self, job):
        dist.new_group()
        return super().prepare(job)


class LeaksThread(Right):
    """Starts a thread that nobody ends."""

    def prepare(self, job):
        threading.Thread(target=threading.Event().wait, daemon=True, name="prefetch").start()
        return super().prepare(job)


_kept = []


class LeaksPort(Right):
    """Listens on a port and goes on doing so."""

    def prepare(self, job):
        _kept.append(socket.create_server(("127.0.0.1", 0)))
        return super().prepare(job)


_parents = []


def plan_and_remember(options, config, world):
    _parents.append(os.getpid())
    return plan(options, config, world)


class NeedsParent(Right):
    """Relies on a global that was filled in the process that planned."""

    def prepare(self, job):
        assert _parents
        return super().prepare(job)


class OddFacts(Right):
    """A fact for the result that is no JSON value."""

    def prepare(self, job):
        return attrs.evolve(super().prepare(job), facts={"where": torch.zeros(3)})


class CallsItself(Right):
    """One hook method calls another."""

    def optimizer_step(self, prepared, apply):
        self.gradients(prepared)
        return super().optimizer_step(prepared, apply)


class OwnState(Right):
    """Keeps state of its own, a tensor under its name and scalars, which are saved and given back."""

    def prepare(self, job):
        prepared = super().prepare(job)
        prepared.engine.update(mean=torch.zeros(3), count=0)
        return prepared

    def optimizer_step(self, prepared, apply):
        prepared.engine["mean"].lerp_(prepared.trainable[0].detach().reshape(-1)[:3], 0.5)
        prepared.engine["count"] += 1
        return super().optimizer_step(prepared, apply)

    def state(self, prepared):
        for buffer in prepared.core.buffers():
            dist.broadcast(buffer, 0)
        own = {f"strategy/{type(self).__name__.lower()}/mean": [Piece(prepared.engine["mean"], (3,), (0,))]}
        return State({**super().state(prepared).pieces, **own}, {"count": prepared.engine["count"]})

    def state_loaded(self, prepared, state):
        prepared.engine["count"] = state.scalars.get("count", 0)


class FewerGroups(Right):
    """As a stage of a pipeline may: the second rank's optimizer has one group less."""

    def prepare(self, job):
        prepared = super().prepare(job)
        if dist.get_rank():
            del prepared.optimizer.param_groups[1]
        return prepared


class ScalarsForgotten(OwnState):
    """The scalars that were saved are not taken back."""

    def state_loaded(self, prepared, state):
        pass


class OwnCopied(OwnState):
    """The tensor of its own is given to be filled as a copy."""

    def state(self, prepared):
        state = super().state(prepared)
        return State(_changed(state, lambda key, p: (key, _copied(key, p))).pieces, state.scalars)


def _copied(key, p):
    return Piece(p.tensor.clone(), p.shape, p.offset) if key.startswith("strategy/") else p


_PLANS = {NeedsParent: plan_and_remember}
