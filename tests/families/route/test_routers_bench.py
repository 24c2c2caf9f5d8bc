"""The cases of the family: what is measured beside torch's operations answers rightly."""

from __future__ import annotations

from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import route as peer
from warploom.generator.families.route import RouteShape


def test_every_way_of_routing_is_right() -> None:
    """Ids that repeat in a token are in the order of their choices."""
    found = peer.contenders(RouteShape(61, 4, 6), 0, Asked(device="cpu"))
    assert_right(found, ["warploom", "torch"], "route_sm90a")
