"""How a gang of launches starts, stops and ends; real processes, a stand-in for torchrun."""

from __future__ import annotations

from collections.abc import Callable

from gang_harness import Gang

MakeGang = Callable[..., Gang]


def test_a_run_that_finishes(gang: MakeGang) -> None:
    one = gang(nodes=3, per_node=2)
    one.start("trainer.py", "steps=30")
    assert one.codes() == [0, 0, 0], one.story()
    assert one.causes() == ["done"] * 3
    assert one.ledger("started")[0].fields["nodes"] == ["n0", "n1", "n2"]
    assert "rank 0 says hello" in one.out(0)
    logs = one.run.logs(0)
    assert [(logs / f"rank-{rank}.log").read_text() for rank in range(6)] == [
        f"rank {r} says hello\n" for r in range(6)
    ]
