"""Mistakes in what is saved, how it is saved, and what a resumed run makes of it."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mtb_core import Piece, State, fragment_pieces
from mtb_core.ckpt import image, loading, opened, safetensors, saving
from mtb_core.ckpt.layout import READY, step_name
from mtb_core.train import schedule, trainer

from .catalogue import OWN_STATE, SHARDED, mistake
from .right import OwnState, Replicated, Sharded


def without(state, unwanted):
    """`state` without the keys that `unwanted` is true of."""
    return State({key: pieces for key, pieces in state.pieces.items() if not unwanted(key)})


@mistake("checkpoints.optimizer_state")
class OptimizerNotSaved(Replicated):
    """Optimizer state is no part of what is saved."""

    def state(self, prepared):
        return without(super().state(prepared), lambda key: key.startswith("optim/"))


@mistake("checkpoints.optimizer_state")
class StepCounterNotSaved(Replicated):
    """The optimizer's count of steps, which its bias correction needs, starts anew after a resume."""

    def state(self, prepared):
        return without(super().state(prepared), lambda key: key.endswith("/step"))


@mistake("checkpoints.restored_state")
class CopiesAreFilled(Replicated):
    """The state that is given to be filled are copies, which nobody looks at again."""

    def state(self, prepared):
        pieces = super().state(prepared).pieces
        return State({k: [attrs.evolve(p, tensor=p.tensor.clone()) for p in own] for k, own in pieces.items()})


@mistake("checkpoints.restored_state", right=OWN_STATE)
class NumbersForgotten(OwnState):
    """A number of its own that was saved is not taken back."""

    def state_loaded(self, prepared, state):
        pass


@mistake("checkpoints.restored_state", right=OWN_STATE)
class OwnTensorCopied(OwnState):
    """A tensor of its own is given to be filled as a copy."""

    def state(self, prepared):
        state = super().state(prepared)
        own = {k: [_copied(p) for p in parts] for k, parts in state.pieces.items() if k.startswith("strategy/")}
        return State({**state.pieces, **own}, state.scalars)


def _copied(piece):
    return attrs.evolve(piece, tensor=piece.tensor.clone())


@mistake("checkpoints.optimizer_state")
class MomentsOfTheFirstSave(Replicated):
    """Optimizer state is copied when it is first asked for, and saved so ever after."""

    def __init__(self):
        self._kept = {}

    def state(self, prepared):
        live = super().state(prepared).pieces
        for key, parts in live.items():
            if key.startswith("optim/"):
                self._kept.setdefault(key, [_copied(piece) for piece in parts])
        return State({**live, **self._kept})


@mistake("checkpoints.exact_resume")
class StateOutsideOfCheckpoints(Replicated):
    """Updates depend on a count of steps that no checkpoint holds."""

    def __init__(self):
        self._steps = 0

    def optimizer_step(self, prepared, apply):
        self._steps += 1
        for parameter in prepared.trainable:
            parameter.grad *= 1 + 0.1 * self._steps
        return super().optimizer_step(prepared, apply)


@mistake("checkpoints.crash")
class CountOutsideOfCheckpoints(StateOutsideOfCheckpoints):
    """The same shows where a run goes on from a checkpoint after a crash."""


@mistake("checkpoints.interchange")
class NumberOfRanksSaved(Replicated):
    """A tensor whose shape is the number of ranks is saved under a name of the model's."""

    def state(self, prepared):
        world = dist.get_world_size()
        return State({**super().state(prepared).pieces, "model/world": [Piece(torch.ones(world), (world,), (0,))]})


@mistake("checkpoints.exact_resume")
class MomentumInBf16(Replicated):
    """Optimizer state loses bits after loading."""

    def state_loaded(self, prepared, state):
        for key, pieces in state.pieces.items():
            for piece in pieces if "/exp_avg" in key else ():
                piece.tensor.copy_(piece.tensor.bfloat16())


@mistake("checkpoints.exact_resume", right=SHARDED)
class MastersNotRenewed(Sharded):
    """What the optimizer updates are copies of the weights, which are not renewed after loading."""

    def _own(self, name, parameter, rank):
        own = super()._own(name, parameter, rank)
        return attrs.evolve(own, shard=nn.Parameter(own.shard.detach().clone()))

    def _share_weights(self, prepared):
        for own in prepared.engine:
            own.whole.detach().view(-1)[own.start : own.start + own.shard.numel()] = own.shard.detach()
        super()._share_weights(prepared)


@mistake("checkpoints.keys")
class KeysWithPrefix(Replicated):
    """The wrapper's own name is part of the keys."""

    def state(self, prepared):
        pieces = super().state(prepared).pieces
        return State({key.replace("/", "/inner.", 1): own for key, own in pieces.items()})


@mistake("checkpoints.shapes", right=SHARDED, ranks=3)
class PaddingSaved(Sharded):
    """Optimizer state is saved flat, with the padding that makes it divisible by the number of ranks."""

    def _optimizer_pieces(self, own, value):
        if not value.dim():
            return super()._optimizer_pieces(own, value)
        share = -(-own.whole.numel() // dist.get_world_size())
        padded = nn.functional.pad(value, (0, share - value.numel()))
        return [Piece(padded, (share * dist.get_world_size(),), (share * dist.get_rank(),))]


@mistake("checkpoints.resharding", right=SHARDED)
class MirroredShards(Sharded):
    """Each rank says of its shard that it lies where another one's does; at the same world size that is not noticed."""

    def _optimizer_pieces(self, own, value):
        if not value.dim():
            return super()._optimizer_pieces(own, value)
        whole = own.whole
        return fragment_pieces(value, tuple(whole.shape), whole.numel() - own.start - value.numel())


@mistake("checkpoints.interchange")
class SavedTransposed(Replicated):
    """Square matrices are saved as the transposes of what they are; loading undoes it, but nobody else's does."""

    def state(self, prepared):
        pieces = super().state(prepared).pieces
        return State({k: [_transposed(p) if k.startswith("model/") else p for p in own] for k, own in pieces.items()})


def _transposed(piece):
    square = len(piece.shape) == 2 and piece.shape[0] == piece.shape[1]
    return attrs.evolve(piece, tensor=piece.tensor.t()) if square else piece


@mistake("models.tied_resume")
class UntiedOnLoad(Replicated):
    """Loading separates what two layers share."""

    def state_loaded(self, prepared, state):
        core = prepared.core
        if prepared.engine.config.tie_embeddings:
            core.head.weight = nn.Parameter(core.head.weight.detach().clone())


@mistake("checkpoints.random_state")
class RandomStateOfRankZero(Replicated):
    """Every rank goes on with the random state of the first; patches core's loading."""

    def prepare(self, job):
        own = loading.read_rng
        loading.read_rng = lambda checkpoint, rank: own(checkpoint, 0)
        return super().prepare(job)


@mistake("checkpoints.random_state")
class SameSeedOnAllRanks(Replicated):
    """All ranks draw the same numbers, so that dropout is the same on each."""

    def __init__(self):
        self._seeded = False

    def micro_batch(self, prepared, micro):
        if not self._seeded:
            torch.manual_seed(prepared.engine.config.seed)
            self._seeded = True
        return super().micro_batch(prepared, micro)

    def state_loaded(self, prepared, state):
        self._seeded = True


@mistake("checkpoints.learning_rate")
class OwnSchedule(Replicated):
    """After a resume the strategy steps a schedule of its own once more."""

    def __init__(self):
        self._resumed = False

    def state_loaded(self, prepared, state):
        self._resumed = True

    def optimizer_step(self, prepared, apply):
        for group in prepared.optimizer.param_groups if self._resumed else ():
            group["lr"] *= 0.5
        self._resumed = False
        return super().optimizer_step(prepared, apply)


@mistake("checkpoints.learning_rate")
class ScheduleTwice(Replicated):
    """After a resume the schedule is a step ahead; patches core's schedule."""

    def state_loaded(self, prepared, state):
        trainer.LearningRate = Ahead


class Ahead(schedule.LearningRate):
    """A schedule that counts the first step twice."""

    def set(self, step):
        return super().set(step + 1)


@mistake("checkpoints.snapshot")
class SnapshotAliases(Replicated):
    """An asynchronous save reads the tensors when it writes them; patches core's snapshot."""

    def prepare(self, job):
        later = {}
        stage, view = image.Image.stage, image.Image.view

        def remember(self, tensors):
            later[id(self)] = list(tensors)

        def read_now(self):
            stage(self, later[id(self)])
            return view(self)

        image.Image.stage, image.Image.view = remember, read_now
        return super().prepare(job)


@mistake("checkpoints.async_agrees")
class RoundedWhenAsynchronous(Replicated):
    """For a shorter pause an asynchronous save holds bf16 numbers."""

    def state(self, prepared):
        state = super().state(prepared)
        if not prepared.engine.config.async_save:
            return state
        rounded = {
            key: [attrs.evolve(piece, tensor=piece.tensor.bfloat16().to(piece.tensor.dtype)) for piece in own]
            for key, own in state.pieces.items()
        }
        return State(rounded)


@mistake("checkpoints.publish_order")
class ReadyFirst(Replicated):
    """READY stands in the step's folder before the data; patches core's saver."""

    def prepare(self, job):
        write = saving.Saver._write

        def ready_first(self, snapshot):
            if self._ctx.rank == 0:
                early = self._folder / step_name(snapshot.step)
                early.mkdir(exist_ok=True)
                (early / READY).write_text("READY\n")
            return write(self, snapshot)

        saving.Saver._write = ready_first
        return super().prepare(job)


@mistake("checkpoints.incomplete_refused")
class DigestsIgnored(Replicated):
    """A damaged checkpoint is resumed from; patches core's comparison of digests."""

    def prepare(self, job):
        opened._check_file = lambda path, name, entry: None
        return super().prepare(job)


@mistake("checkpoints.bf16_resume")
class MastersFromBf16(Replicated):
    """With bf16, a resumed run takes its fp32 weights from their bf16 copies."""

    def state_loaded(self, prepared, state):
        if prepared.engine.config.precision == "bf16":
            with torch.no_grad():
                for parameter in prepared.core.parameters():
                    parameter.copy_(parameter.bfloat16())


@mistake("checkpoints.sgd_resume")
class MomentumOfSgdLost(Replicated):
    """A resumed run keeps what AdamW needs, and starts SGD's momentum anew."""

    def state_loaded(self, prepared, state):
        for values in prepared.optimizer.state.values():
            if values.get("momentum_buffer") is not None:
                values["momentum_buffer"].zero_()


@mistake("checkpoints.buffers")
class BuffersCopied(Replicated):
    """Buffers are given to be filled as copies, so that what was saved of them is lost."""

    def state(self, prepared):
        buffers = {f"model/{name}" for name, _ in prepared.core.named_buffers()}
        pieces = super().state(prepared).pieces
        copied = {
            k: [attrs.evolve(p, tensor=p.tensor.clone()) for p in own] for k, own in pieces.items() if k in buffers
        }
        return State({**pieces, **copied})


@mistake("checkpoints.buffers")
class BuffersStartAnew(Replicated):
    """Loading is followed by what a fresh start does to buffers."""

    def state_loaded(self, prepared, state):
        for buffer in prepared.core.buffers():
            buffer.zero_()


@mistake("checkpoints.publish_order", right=SHARDED)
class PartNotInIndex(Sharded):
    """The checkpoint format leaves one part of each shared tensor out of its index; patches core's format."""

    def prepare(self, job):
        index = safetensors.SafetensorsStorage.index

        def shorter(self, entries):
            kept = {
                key: attrs.evolve(e, chunks=e.chunks[:-1] if len(e.chunks) > 1 else e.chunks)
                for key, e in entries.items()
            }
            return index(self, kept)

        safetensors.SafetensorsStorage.index = shorter
        return super().prepare(job)


@mistake("checkpoints.restored_state", right=SHARDED)
class PartsMixedUp(Sharded):
    """The checkpoint format notes places of equal parts of a tensor in the wrong order; patches core's format."""

    def prepare(self, job):
        index = safetensors.SafetensorsStorage.index

        def swapped(self, entries):
            return index(self, {key: _swapped(entry) for key, entry in entries.items()})

        safetensors.SafetensorsStorage.index = swapped
        return super().prepare(job)


def _swapped(entry):
    first, *others = entry.chunks
    same = next((c for c in others if c.sizes == first.sizes and c.length), None)
    if same is None:
        return entry
    changed = {first: attrs.evolve(same, offset=first.offset), same: attrs.evolve(first, offset=same.offset)}
    return attrs.evolve(entry, chunks=tuple(changed.get(chunk, chunk) for chunk in entry.chunks))
