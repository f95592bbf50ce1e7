"""Which all-reduce is chosen, over made-up tables of where ranks are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.parallel.fast_choice import MEASURED, SIZES, Choice, Method, Place, Topology, choose, limits, unmet

H200, B200 = (9, 0), (10, 0)


def on_node(size: int, **more: object) -> Topology:
    places = [Place(node="a", device=rank, capability=H200) for rank in range(size)]
    return replace(Topology(places=places), **more)  # type: ignore[arg-type]


def across(size: int, per_node: int = 4, capability: tuple[int, int] = B200, fabric: str = "f/1") -> Topology:
    places = [
        Place(node=f"n{rank // per_node}", device=rank % per_node, capability=capability, fabric=fabric)
        for rank in range(size)
    ]
    return Topology(places=places, multicast=True)


@pytest.mark.parametrize("size", SIZES)
def test_peers_on_one_node_are_fast(size: int) -> None:
    choice = choose(on_node(size))
    assert choice.is_fast
    assert not choice.warns
    assert choice.reason == f"{size} GPUs, all pairs reach each other's memory"
    assert choice.method(16) is Method.ONE_SHOT
    assert choice.method(1 << 20) is Method.TWO_SHOT
    assert choice.method((16 << 20) + 1) is Method.NCCL
    assert choice.capacity == 16 << 20


@pytest.mark.parametrize("size", [3, 5, 7, 12, 32])
def test_other_sizes_fall_back_with_a_warning(size: int) -> None:
    choice = choose(on_node(size))
    assert (choice.is_fast, choice.warns) == (False, True)
    assert choice.reason == f"it is for groups of 2, 4, 6, 8 or 16 ranks, not {size}"
    assert choice.text() == f"nccl ({choice.reason})"


def test_one_rank_is_silent() -> None:
    choice = choose(on_node(1, disabled=True))
    assert (choice.is_fast, choice.warns, choice.reason) == (False, False, "one rank")


def test_who_switches_it_off_gets_no_warning() -> None:
    choice = choose(on_node(4, disabled=True))
    assert (choice.is_fast, choice.warns, choice.reason) == (False, False, "--disable-custom-all-reduce")


def test_a_pair_that_cannot_reach_each_other_is_named() -> None:
    topology = on_node(4, peers={(0, 1): "", (1, 3): "the driver says so", (2, 3): "what is read over it is wrong"})
    choice = choose(topology)
    assert choice.warns
    assert choice.reason == "GPUs 1 and 3 do not reach each other's memory: the driver says so"


def test_ranks_that_share_a_gpu() -> None:
    places = [Place(node="a", device=0, capability=H200)] * 2
    assert choose(Topology(places=places)).reason == "ranks 0 and 1 of the group share GPU 0"


def test_what_a_torch_lacks_is_named() -> None:
    topology = on_node(2)
    places = [topology.places[0], replace(topology.places[1], lacks="this torch has no symmetric memory")]
    assert choose(replace(topology, places=places)).reason == "rank 1 of the group: this torch has no symmetric memory"


def test_across_nodes_in_one_nvlink_domain() -> None:
    choice = choose(across(8))
    assert choice.is_fast
    assert choice.reason == "8 GPUs, one multi-node NVLink domain"


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        (
            across(8, capability=H200),
            "across machines it needs compute capability 10.0, but rank 0 of the group has 9.0",
        ),
        (
            across(8, fabric=""),
            "across machines it needs a multi-node NVLink domain, but rank 0 of the group is in none",
        ),
        (
            replace(across(8), multicast=False),
            "across machines it needs NVLink multicast, which is off (TORCH_SYMM_MEM_DISABLE_MULTICAST=0 allows it)",
        ),
        (
            replace(across(4), places=[*across(4, 2).places[:3], replace(across(4, 2).places[3], fabric="f/2")]),
            "the ranks are in different NVLink domains",
        ),
        (
            replace(across(8), places=[*across(8).places[:7], replace(across(8).places[7], capability=(9, 9))]),
            "across machines it needs compute capability 10.0, but rank 7 of the group has 9.9",
        ),
    ],
)
def test_each_condition_across_nodes(topology: Topology, reason: str) -> None:
    choice = choose(topology)
    assert (choice.is_fast, choice.warns, choice.reason) == (False, True, reason)


def test_multicast_and_capability_do_not_matter_on_one_node() -> None:
    topology = on_node(2)
    places = [replace(place, capability=(8, 0)) for place in topology.places]
    assert not topology.multicast
    assert choose(replace(topology, places=places)).is_fast


@given(
    st.lists(
        st.builds(
            Place,
            node=st.sampled_from(["a", "b"]),
            device=st.integers(0, 7),
            capability=st.sampled_from([H200, B200, (10, 3)]),
            fabric=st.sampled_from(["", "f", "g"]),
            lacks=st.sampled_from(["", "", "", "no"]),
        ),
        min_size=1,
        max_size=17,
    ),
    st.booleans(),
    st.booleans(),
    st.dictionaries(st.tuples(st.integers(0, 7), st.integers(8, 16)), st.sampled_from(["", "no"]), max_size=3),
)
def test_fast_exactly_if_every_condition_holds(
    places: list[Place], multicast: bool, disabled: bool, peers: dict[tuple[int, int], str]
) -> None:
    size = len(places)
    peers = {pair: why for pair, why in peers.items() if pair[1] < size}
    topology = Topology(places=places, multicast=multicast, disabled=disabled, peers=peers)
    choice = choose(topology)
    apart = len({(place.node, place.device) for place in places}) == size
    one_node = len({place.node for place in places}) == 1
    linked = (
        not any(peers.values())
        if one_node
        else multicast
        and all(place.capability >= B200 and place.fabric for place in places)
        and len({place.fabric for place in places}) == 1
    )
    well = size in SIZES and apart and linked and not any(place.lacks for place in places)
    assert choice.is_fast == (well and not disabled)
    assert choice.warns == (size > 1 and not disabled and not well)
    assert bool(unmet(topology)) == (not well)
    assert choice.reason


@given(
    st.dictionaries(
        st.integers(1, 1 << 26),
        st.fixed_dictionaries({method: st.floats(1, 1000) for method in Method}),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 1 << 27),
)
def test_the_method_is_the_fastest_of_the_next_larger_size(table: dict[int, dict[Method, float]], size: int) -> None:
    choice = Choice(limits=limits(2, {2: table}), reason="made up")
    above = [one for one in sorted(table) if one >= size]
    method = choice.method(size)
    if above:
        times = table[above[0]]
        assert times[method] <= min(times.values()) * 1.03
    else:
        assert method is Method.NCCL
    assert choice.capacity == 0 or choice.capacity in table


def test_limits_ascend_and_end_where_nothing_beats_nccl() -> None:
    slow = {Method.NCCL: 1.0, Method.ONE_SHOT: 5.0, Method.TWO_SHOT: 5.0}
    quick = slow | {Method.ONE_SHOT: 0.5}
    assert limits(2, {2: {64: quick, 128: slow}}) == ((64, Method.ONE_SHOT),)
    assert limits(2, {2: {64: slow, 128: quick}}) == ((64, Method.NCCL), (128, Method.ONE_SHOT))
    assert limits(2, {2: {64: slow, 128: slow}}) == ()


def test_one_shot_ends_earlier_with_more_ranks() -> None:
    found = [{method: most for most, method in limits(size)}[Method.ONE_SHOT] for size in SIZES]
    assert found == sorted(found, reverse=True)
    assert found[0] == 2 * found[1] == 4 * found[3]


def test_the_table_has_each_method_at_each_size() -> None:
    for rows in MEASURED.values():
        assert sorted(rows) == list(rows)
        assert all(set(times) == set(Method) for times in rows.values())
        assert all(earlier < later for earlier, later in itertools.pairwise(rows))


def test_the_text_says_what_and_why() -> None:
    assert choose(on_node(2)).text() == (
        "one_shot to 64 KiB, two_shot to 16384 KiB, nccl above (2 GPUs, all pairs reach each other's memory)"
    )
