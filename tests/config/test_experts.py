"""Options of expert parallelism: their names, their forms, and what they need of each other."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.cli.args import Parser, add_flags, configs, parse
from drumline.config import EngineConfig, EPLBConfig, ParallelConfig
from drumline.errors import ConfigError
from drumline.llm.options import make_config


def parsed(*argv: str) -> EngineConfig:
    parser = Parser()
    add_flags(parser)
    return configs(parse(parser, argv))[0]


def test_flags_and_keyword_arguments_say_the_same() -> None:
    json = '{"num_redundant_experts": 2, "step_interval": 7, "use_async": false}'
    flags = ["-tp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config", json]
    by_flags = parsed(*flags, "--all2all-backend", "allgather_reducescatter").parallel
    for form in (json, {"num_redundant_experts": 2, "step_interval": 7}, by_flags.eplb_config):
        by_name = make_config(
            tensor_parallel_size=2,
            enable_expert_parallel=True,
            enable_eplb=True,
            eplb_config=form,
            all2all_backend="allgather_reducescatter",
        )
        assert by_name.parallel == by_flags
    assert by_flags.eplb_config == EPLBConfig(num_redundant_experts=2, step_interval=7)
    assert parsed().parallel.eplb_config == EPLBConfig()


def test_sizes() -> None:
    sizes: dict[str, Any] = {"tensor_parallel_size": 3, "data_parallel_size": 2, "pipeline_parallel_size": 2}
    dense = ParallelConfig(**sizes)
    assert (dense.expert_parallel_size, dense.spans_engines) == (1, False)
    experts = ParallelConfig(enable_expert_parallel=True, **sizes)
    assert (experts.expert_parallel_size, experts.spans_engines, experts.world_size) == (6, True, 6)
    assert not ParallelConfig(enable_expert_parallel=True, tensor_parallel_size=2).spans_engines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, r"enable_eplb \(--enable-eplb\) moves whole experts.*add --enable-expert-parallel"),
        ({"enable_eplb": True, "enable_expert_parallel": True}, "needs several ranks"),
        ({"eplb_config": {"num_redundant_experts": 1}}, "does nothing without balancing: add --enable-eplb"),
        (
            {"eplb_config": {"step_interval": 7}},
            r"^step_interval of eplb_config \(--eplb-config\) does nothing without",
        ),
        (
            {"eplb_config": {"window_size": 7, "log_balancedness": True}},
            "^window_size, log_balancedness of .* do nothing",
        ),
        ({"all2all_backend": "all_to_all"}, r"\(--all2all-backend\) all_to_all does .* add --enable-expert-parallel"),
        ({"eplb_config": {"window": 1}}, r"eplb_config \(--eplb-config\) has no window; there are window_size, step_"),
        ({"eplb_config": {"use_async": True}}, "has no use_async"),
        ({"eplb_config": {"step_interval": 0}}, "step_interval of eplb_config .* at least 1, not 0"),
        ({"eplb_config": {"log_balancedness": 1}}, "must be true or false, not 1"),
        ({"eplb_config": "{"}, "is no JSON"),
        ({"eplb_config": "[1]"}, "must be JSON such as"),
        ({"all2all_backend": "pplx"}, "all2all_backend .* must be one of auto, all_to_all, allgather_reducescatter"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**options)


def test_the_default_may_be_given() -> None:
    defaults = {"step_interval": 3000, "use_async": False}
    assert ParallelConfig(eplb_config=defaults, all2all_backend="auto") == ParallelConfig()
