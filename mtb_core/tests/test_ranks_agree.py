from mtb_core.api import Layout, RankContext, World
from mtb_core.ranks.agree import from_rank_zero, gather_objects, same_on_all
from mtb_core.ranks.context import open_ranks
from mtb_core.tests.launching import plan_for, run_ranks

ALONE = RankContext(0, 0, World(1, 1), "cpu", None, Layout((("dp", 1),)))


def test_one_rank_agrees_with_itself():
    """With one rank and no process group every helper works."""
    assert gather_objects(ALONE, {"a": 1}) == [{"a": 1}]
    assert from_rank_zero(ALONE, "x") == "x"
    same_on_all(ALONE, "things", 1)


def caught(function, *args):
    """What calling raises, as (class name, message, rank, step)."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "step", None)
    return None


def talk(_payload, worker):
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        return {
            "gather": gather_objects(ctx, ctx.rank * 10),
            "zero": from_rank_zero(ctx, f"from {ctx.rank}"),
            "same": caught(same_on_all, ctx, "the plugins", ["a"]),
            "differ": caught(same_on_all, ctx, "the plugins", [("a", ctx.rank)]),
        }


def test_two_ranks_agree(tmp_path):
    """All ranks get the same answers."""
    out = run_ranks(talk, tmp_path)
    for answers in out.values.values():
        assert answers["gather"] == [0, 10]
        assert answers["zero"] == "from 0"
        assert answers["same"] is None
        kind, message, rank, _ = answers["differ"]
        assert (kind, rank) == ("RunFailed", 1)
        assert "the plugins: rank 0 has [('a', 0)], rank 1 has [('a', 1)]" in message
