import pytest

from mtb_core.api import ConfigError, Layout, NonFinite, RankContext, RunFailed, World
from mtb_core.ranks.agree import all_ok, from_rank_zero, gather_objects, same_on_all
from mtb_core.ranks.context import open_ranks
from mtb_core.tests.launching import plan_for, run_ranks

ALONE = RankContext(0, 0, World(1, 1), "cpu", None, Layout((("dp", 1),)))


def test_one_rank_agrees_with_itself():
    """With one rank and no process group every helper works."""
    assert gather_objects(ALONE, {"a": 1}) == [{"a": 1}]
    assert from_rank_zero(ALONE, "x") == "x"
    same_on_all(ALONE, "things", 1)
    all_ok(ALONE)
    with pytest.raises(ValueError, match="mine"):
        all_ok(ALONE, ValueError("mine"))


def caught(function, *args):
    """What calling raises, as (class name, message, rank, step)."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "step", None)
    return None


def talk(_payload, worker):
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        error = [None, ValueError("boom")][ctx.rank]
        config = [None, ConfigError("bad value")][ctx.rank]
        agreed = NonFinite("not finite", rank=1, step=4)
        return {
            "gather": gather_objects(ctx, ctx.rank * 10),
            "zero": from_rank_zero(ctx, f"from {ctx.rank}"),
            "same": caught(same_on_all, ctx, "the plugins", ["a"]),
            "differ": caught(same_on_all, ctx, "the plugins", [("a", ctx.rank)]),
            "ok": caught(all_ok, ctx),
            "error": caught(all_ok, ctx, error),
            "config": caught(all_ok, ctx, config),
            "agreed": caught(all_ok, ctx, agreed),
        }


def test_two_ranks_agree(tmp_path):
    """All ranks get the same answers, and where one has an error all raise, naming it."""
    out = run_ranks(talk, tmp_path)
    zero, one = out.values[0], out.values[1]
    for answers in (zero, one):
        assert answers["gather"] == [0, 10]
        assert answers["zero"] == "from 0"
        assert answers["same"] is None
        assert answers["ok"] is None
        kind, message, rank, _ = answers["differ"]
        assert (kind, rank) == ("RunFailed", 1)
        assert "the plugins: rank 0 has [('a', 0)], rank 1 has [('a', 1)]" in message
        assert answers["config"][:2] == ("ConfigError", "bad value")
    assert zero["error"] == ("RunFailed", "ValueError: boom", 1, None)
    assert one["error"] == ("ValueError", "boom", None, None)
    assert zero["agreed"] == ("NonFinite", "not finite", 1, 4)
    assert one["agreed"] == ("RunFailed", "not finite", 1, 4)
    assert issubclass(NonFinite, RunFailed)
