from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import ParallelConfig
from drumline.errors import ConfigError
from drumline.parallel.layout import (
    GroupKind,
    Layout,
    device_index,
    global_rank,
    local_rank_of,
    local_ranks,
    node_of,
    worker_places,
)
from drumline.processes.titles import worker_name

sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pcp = draw(sizes), draw(sizes)
    dcp = draw(st.sampled_from([n for n in range(1, tp * pcp + 1) if tp * pcp % n == 0]))
    return Layout(
        tp=tp, pcp=pcp, dcp=dcp, pp=draw(sizes), dp=draw(st.integers(1, 3)), external_dp=draw(st.integers(1, 2))
    )


def of(layout: Layout, kind: GroupKind) -> list[list[int]]:
    return [list(group) for group in layout.groups[kind]]


def test_8_ranks_with_tp_2_and_pp_4() -> None:
    layout = Layout(tp=2, pp=4)
    assert of(layout, GroupKind.TP) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert of(layout, GroupKind.PP) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.output_rank == 6
    assert [rank for rank in range(8) if layout.is_driver(rank)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("dcp", "groups"),
    [
        (1, [[0], [4], [1], [5], [2], [6], [3], [7]]),
        (2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (4, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (8, [[0, 4, 1, 5, 2, 6, 3, 7]]),
    ],
)
def test_dcp_groups_are_cut_with_pcp_fastest(dcp: int, groups: list[list[int]]) -> None:
    assert of(Layout(pcp=2, tp=4, dcp=dcp), GroupKind.DCP) == groups


def test_dcp_groups_are_chunks_of_tp_without_pcp() -> None:
    assert of(Layout(tp=4, pp=2, dcp=2), GroupKind.DCP) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_groups_of_all_axes() -> None:
    layout = Layout(dp=2, pp=2, pcp=2, tp=2)
    assert of(layout, GroupKind.PCP)[:3] == [[0, 2], [1, 3], [4, 6]]
    assert of(layout, GroupKind.DP)[:3] == [[0, 8], [1, 9], [2, 10]]
    assert of(layout, GroupKind.EP) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert of(layout, GroupKind.WORLD) == [list(range(16))]
    assert layout.output_rank == 4
    assert layout.group_size(GroupKind.ETP) == 1


@given(layouts())
def test_every_kind_is_a_partition_into_equal_groups(layout: Layout) -> None:
    for kind in GroupKind:
        groups = layout.groups[kind]
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        assert {len(group) for group in groups} == {layout.group_size(kind)}
        for rank in range(layout.size):
            assert layout.group_of(kind, rank)[layout.rank_in_group(kind, rank)] == rank


@given(layouts())
def test_group_sizes_follow_from_the_axes(layout: Layout) -> None:
    expected = {
        GroupKind.WORLD: layout.size,
        GroupKind.TP: layout.tp,
        GroupKind.PCP: layout.pcp,
        GroupKind.PP: layout.pp,
        GroupKind.DP: layout.dp,
        GroupKind.EP: layout.dp * layout.pcp * layout.tp,
        GroupKind.EPLB: layout.dp * layout.pcp * layout.tp,
        GroupKind.DCP: layout.dcp,
        GroupKind.ETP: 1,
    }
    assert {kind: layout.group_size(kind) for kind in GroupKind} == expected


@given(layouts())
def test_members_differ_only_on_the_axes_of_their_kind(layout: Layout) -> None:
    axes = {"tp": {"tp"}, "pcp": {"pcp"}, "pp": {"pp"}, "dp": {"dp"}, "ep": {"dp", "pcp", "tp"}, "dcp": {"pcp", "tp"}}
    for kind, varying in axes.items():
        for group in layout.groups[GroupKind(kind)]:
            places = [layout.coordinates(rank)._asdict() for rank in group]
            for name in places[0]:
                if name not in varying:
                    assert len({place[name] for place in places}) == 1
    for kind in GroupKind:  # members of all but DCP ascend: their order is that of the axes
        if kind is not GroupKind.DCP:
            assert all(list(group) == sorted(group) for group in layout.groups[kind])


@given(layouts())
def test_coordinates_and_rank_are_inverse(layout: Layout) -> None:
    seen = set()
    for rank in range(layout.size):
        place = layout.coordinates(rank)
        seen.add(place)
        assert layout.rank(**place._asdict()) == rank
        assert layout.is_driver(rank) == (rank % layout.tp == 0)
    assert len(seen) == layout.size


@given(layouts())
def test_output_rank_is_the_first_of_the_last_stage(layout: Layout) -> None:
    place = layout.coordinates(layout.output_rank)
    assert (place.pp, place.pcp, place.tp) == (layout.pp - 1, 0, 0)
    assert layout.output_rank == layout.world_size - layout.tp * layout.pcp


def test_bad_ranks_and_sizes_are_refused() -> None:
    layout = Layout(tp=2)
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        layout.coordinates(2)
    with pytest.raises(ValueError, match="pp 1"):
        layout.rank(pp=1)
    with pytest.raises(ConfigError, match="at least 1"):
        Layout(tp=0)
    with pytest.raises(ConfigError, match="--decode-context-parallel-size"):
        Layout(tp=4, dcp=3)
    with pytest.raises(ConfigError, match="etp"):
        Layout(tp=4, etp=2)


def test_layout_of_a_configuration() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=3)
    assert Layout.of(parallel).size == 4
    assert Layout.of(parallel, span_engines=True).size == 12


def test_global_rank_agrees_with_the_layout_that_spans_engines() -> None:
    for dp_rank in range(3):
        parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=3, data_parallel_rank=dp_rank)
        layout = Layout.of(parallel, span_engines=True)
        assert [global_rank(parallel, tp) for tp in range(2)] == [layout.rank(dp=dp_rank, tp=tp) for tp in range(2)]


def test_nodes_and_local_ranks() -> None:
    nodes = [
        ParallelConfig(tensor_parallel_size=4, nnodes=2, node_rank=node, master_addr="10.0.0.1") for node in range(2)
    ]
    assert [list(local_ranks(parallel)) for parallel in nodes] == [[0, 1], [2, 3]]
    assert [node_of(nodes[0], rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [local_rank_of(nodes[0], rank) for rank in range(4)] == [0, 1, 0, 1]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_local_ranks_of_all_nodes_are_the_world_and_devices_are_apart(tp: int, pp: int, dp: int, nodes: int) -> None:
    taken = []
    for dp_rank in range(dp):
        world: list[int] = []
        for node in range(nodes):
            parallel = ParallelConfig(
                tensor_parallel_size=tp * nodes,
                pipeline_parallel_size=pp,
                data_parallel_size=dp,
                data_parallel_rank=dp_rank,
                nnodes=nodes,
                node_rank=node,
                master_addr="10.0.0.1",
            )
            world += local_ranks(parallel)
            for rank in local_ranks(parallel):
                assert node_of(parallel, rank) == node
                taken.append((node, device_index(parallel, local_rank_of(parallel, rank))))
        assert world == list(range(parallel.world_size))
    assert len(set(taken)) == len(taken) == nodes * parallel.local_devices


def test_devices_of_dp_ranks_stand_side_by_side() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=4, data_parallel_rank=3)
    assert [device_index(parallel, local_rank) for local_rank in range(2)] == [6, 7]
    other = ParallelConfig(
        tensor_parallel_size=2, data_parallel_size=4, data_parallel_rank=3, data_parallel_size_local=2
    )
    assert [device_index(other, local_rank) for local_rank in range(2)] == [2, 3]


def test_worker_places_give_the_names_of_workers() -> None:
    assert worker_name(**worker_places(ParallelConfig(tensor_parallel_size=2), 1)) == "Worker_TP1"
    assert worker_name(**worker_places(ParallelConfig(), 0)) == "Worker"
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
        data_parallel_size=2,
        data_parallel_rank=1,
    )
    assert worker_name(**worker_places(parallel, 6)) == "Worker_DP1_PP1_PCP1_TP0_DCP1"
    experts = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, data_parallel_rank=1)
    assert worker_name(**worker_places(experts, 1), expert_parallel=True) == "Worker_DP1_TP1_EP3"
