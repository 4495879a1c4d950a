import time

from mtb_core.ranks import inquiry
from mtb_core.ranks.context import open_ranks
from mtb_core.ranks.inquiry import Answer, Inquiry
from mtb_core.tests.launching import plan_for, run_ranks


class Owner:
    """Has, or passed, what is listed."""

    def __init__(self, ctx, *things):
        self.things = set(things)
        self.inquiry = Inquiry(ctx, "test", self.has)

    def has(self, number, what):
        return (number, what) in self.things


def both_miss(_payload, worker):
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        first = Owner(ctx).inquiry.all_miss(1, "a b")
        owner = Owner(ctx, *([(1, "a b")] if ctx.rank else []))
        second = owner.inquiry.all_miss(1, "a b") if ctx.rank == 0 else None
        ctx.store.wait(["done"]) if ctx.rank else ctx.store.set("done", "")
    return first, second


def test_trials_are_apart(tmp_path):
    """What all missed in one trial is not taken for missed in the next; there the rank that has it says so."""
    assert run_ranks(both_miss, tmp_path).values == {0: (Answer.ALL, Answer.SOME), 1: (Answer.ALL, None)}


def one_is_late(_payload, worker):
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        owner = Owner(ctx)
        if ctx.rank:
            time.sleep(3.0)
        return owner.inquiry.all_miss(7, "x")


def test_late_ranks_are_waited_for(tmp_path):
    """A rank that comes seconds later and misses it too is no rank that has it."""
    assert run_ranks(one_is_late, tmp_path).values == {0: Answer.ALL, 1: Answer.ALL}


def one_is_silent(_payload, worker):
    inquiry.PATIENCE_S = 1.0
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        owner = Owner(ctx)
        if ctx.rank:
            ctx.store.wait(["done"])
            return None
        answer = owner.inquiry.all_miss(1, "x")
        ctx.store.set("done", "")
        return answer


def test_silence_is_not_taken_for_an_answer(tmp_path):
    """Where others neither have it nor miss it, that is what is said."""
    assert run_ranks(one_is_silent, tmp_path).values == {0: Answer.SILENT, 1: None}
