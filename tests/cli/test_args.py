from __future__ import annotations

import pytest

from drumline.cli import args
from drumline.cli.main import main
from drumline.config import EngineConfig, ServerConfig, flag_of
from drumline.errors import ConfigError


def parsed(*argv: str) -> tuple[EngineConfig, ServerConfig]:
    parser = args.Parser(prog="drumline serve")
    args.add_flags(parser)
    return args.configs(args.parse(parser, argv))


def refused(*argv: str) -> str:
    parser = args.Parser(prog="drumline serve")
    args.add_flags(parser)
    namespace = args.parse(parser, argv)
    with pytest.raises(ConfigError) as e:
        args.refuse_unbuilt(namespace, *args.configs(namespace))
    return str(e.value)


def test_nothing_given_is_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRUMLINE_API_KEY", raising=False)
    assert parsed() == (EngineConfig(), ServerConfig())


def test_names_of_vllm() -> None:
    model = "some/model -tp 4 -pp 2 -dp 3 -pcp 2 -dcp 2 --max-model-len 8k --max-num-seqs=7 --dtype bfloat16"
    other = "--host ::1 --port 0 --api-key a --api-key b --served-model-name x y --kv-cache-memory-bytes 512MiB"
    engine, server = parsed(*model.split(), *other.split())
    parallel = engine.parallel
    assert engine.model.model == "some/model"
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size) == (4, 2, 3)
    assert (parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) == (2, 2)
    assert engine.model.max_model_len == 8000
    assert engine.scheduler.max_num_seqs == 7
    assert engine.model.served_model_name == ("x", "y")
    assert engine.cache.kv_cache_memory_bytes == 512 << 20
    assert server == ServerConfig(host="::1", port=0, api_key=("a", "b"))


def test_both_spellings_and_switches() -> None:
    engine, _ = parsed(
        "--tensor_parallel_size=2", "--max_model_len", "5", "--no-enable-prefix-caching", "--enforce_eager"
    )
    assert engine.parallel.tensor_parallel_size == 2
    assert engine.model.max_model_len == 5
    assert not engine.cache.enable_prefix_caching
    assert engine.model.enforce_eager
    assert parsed("--enable-prefix-caching")[0].cache.enable_prefix_caching


def test_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("-tp", "3", "--tp-weights", "2,1,1")[0].parallel.tp_weights == (2, 1, 1)
    assert parsed("-tp", "3", "--tp-weights", "auto")[0].parallel.tp_weights == "auto"
    with pytest.raises(ConfigError, match="2,1 has 2 numbers, but --tensor-parallel-size is 3"):
        parsed("-tp", "3", "--tp-weights", "2,1")
    with pytest.raises(SystemExit):
        parsed("--tp-weights", "evenly")
    assert "'evenly' is not a whole number" in capsys.readouterr().err


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMLINE_API_KEY", "secret")
    assert parsed()[1].api_key == ("secret",)
    assert parsed("--api-key", "other")[1].api_key == ("other",)


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("4k", 4000), ("4K", 4096), ("2m", 2_000_000), ("1G", 1 << 30), ("-1", -1)]
)
def test_counts(text: str, value: int) -> None:
    assert args.count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("512MiB", 512 << 20),
        ("512M", 512 << 20),
        ("512MB", 512_000_000),
        ("1.5G", 3 << 29),
        ("2g", 2 * 10**9),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert args.size(text) == value


@pytest.mark.parametrize(
    "argv", [["--max-model-len", "many"], ["--kv-cache-memory-bytes", "1 GB"], ["--dtype", "int3"]]
)
def test_values_that_are_none(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parsed(*argv)
    assert e.value.code == 2
    error = capsys.readouterr().err
    assert argv[0] in error
    assert error.count("\n") == 2


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for given, nearest in (("--tensor-paralel-size", "--tensor-parallel-size"), ("--max_len", "--max-model-len")):
        with pytest.raises(SystemExit) as e:
            parsed(given, "2")
        assert e.value.code == 2
        assert f"did you mean {nearest}?" in capsys.readouterr().err


def test_abbreviations_are_not_guessed() -> None:
    with pytest.raises(SystemExit):
        parsed("--tensor", "2")


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["-dp", "2", "-tp", "2"], ["--data-parallel-size"]),
        (["--nnodes", "2", "-tp", "2", "--master-addr", "x"], ["--nnodes"]),
        (["--headless", "--data-parallel-hybrid-lb"], ["--headless", "--data-parallel-hybrid-lb"]),
        (["--api-server-count", "2"], ["--api-server-count"]),
        (["-tp", "2", "--distributed-executor-backend", "ray"], ["ray"]),
        (["--data-parallel-address", "x"], ["--data-parallel-address"]),
    ],
)
def test_what_serve_cannot_do_yet(argv: list[str], names: list[str]) -> None:
    message = refused(*argv)
    assert "not built yet" in message
    assert all(name in message for name in names)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["serve", "-dp", "2"], 2, "not built yet"),
        (["serve", "a", "--model", "b"], 2, "one of them"),
        (["serve", "-tp", "0"], 2, "--tensor-parallel-size"),
        (["serve", "--port", "99999"], 2, "--port"),
        (["serve", "--host", "no.such.host.invalid"], 2, "--host"),
        (["serv"], 2, "did you mean 'serve'?"),
        (["dance"], 2, "serve, chat, plan"),
        (["--versio"], 2, "--version"),
    ],
)
def test_usage_errors_are_short(argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = main(argv)
    except SystemExit as e:
        found = int(e.code or 0)
    assert found == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") <= 2
    assert "Traceback" not in error


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("drumline ")
    with pytest.raises(SystemExit) as e:
        main(["serve", "--help"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    assert all(f"{group}:" in text for group in args.GROUPS)
    assert len(text.splitlines()) < 120


def test_every_flag_fills_a_field() -> None:
    for flags in args.GROUPS.values():
        for flag in flags:
            kind = args.SECTIONS.get(flag.section, EngineConfig)
            assert flag.field in set(kind.__dataclass_fields__), flag.names
            # What messages of the configuration call it.
            assert flag_of(flag.field) in flag.names


def test_starts_and_numa() -> None:
    engine, _ = parsed(
        "--worker-start-method", "plain", "--numa-bind-nodes", "0", "1", "--numa-bind-cpus", "0-3", "4,6"
    )
    process = engine.process
    assert (process.worker_start_method, process.numa) == ("plain", True)
    assert (process.numa_bind_nodes, process.numa_bind_cpus) == ((0, 1), ("0-3", "4,6"))
    assert parsed("--numa-bind")[0].process.numa_bind
    assert parsed()[0].process.worker_start_method == "auto"


def test_waits_rings_and_device() -> None:
    waits = "--start-timeout 1 --execute-model-timeout 2.5 --stop-timeout 3 --failure-grace 4"
    rings = "--mq-slots 8 --mq-slot-bytes 1KiB --mq-answer-slots 4 --mq-answer-slot-bytes 512 --mq-arena-bytes 2MiB"
    engine, _ = parsed(*waits.split(), *rings.split(), "--distributed-timeout", "5", "--device", "cpu")
    process = engine.process
    assert (process.start_timeout_s, process.execute_timeout_s, process.stop_timeout_s) == (1, 2.5, 3)
    assert process.failure_grace_s == 4
    assert (process.mq_slots, process.mq_slot_bytes, process.mq_answer_slots) == (8, 1024, 4)
    assert (process.mq_answer_slot_bytes, process.mq_arena_bytes) == (512, 2 << 20)
    assert engine.parallel.distributed_timeout_s == 5
    assert engine.platform == parsed("--platform", "cpu")[0].platform == "cpu"
    with pytest.raises(ConfigError, match=r"execute_timeout_s \(--execute-model-timeout\) must be"):
        parsed("--execute-model-timeout", "0")


def test_the_end_of_a_server() -> None:
    _, server = parsed()
    assert (server.drain_lag_s, server.shutdown_timeout_s) == (None, 20)
    _, server = parsed("--drain-lag", "0", "--shutdown-timeout", "0")
    assert (server.drain_lag_s, server.shutdown_timeout_s) == (0, 0)


def test_remote_code_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine, server = parsed("some/model", "--trust-remote-code")
    args.refuse_unbuilt(args.argparse.Namespace(), engine, server)
    assert "trust_remote_code (--trust-remote-code) has no effect" in caplog.text
    assert not engine.model.trust_remote_code
