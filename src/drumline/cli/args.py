"""Flags of ``serve`` and ``plan``, with the names that vLLM's users know, and how they become a configuration.

One table is the whole truth: a row names the flag, the field that it fills, its type and its line of help. A flag that
is not given leaves the field's own default alone, so defaults stand in ``config`` only.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from drumline.config import (
    ALL2ALL,
    DTYPE_ALIASES,
    DTYPES,
    LOAD_FORMATS,
    LOG_LEVELS,
    MODEL_IMPLS,
    POLICIES,
    START_METHODS,
    SWITCH,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ProcessConfig,
    SchedulerConfig,
    ServerConfig,
)
from drumline.errors import ConfigError, ExitCode

SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "process": ProcessConfig,
    "server": ServerConfig,
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag."""

    names: tuple[str, ...]
    section: str
    field: str
    help: str
    parse: Callable[[str], Any] | None = str
    """None: a switch, with a ``--no-`` form."""
    choices: tuple[str, ...] | None = None
    several: bool = False
    metavar: str | None = None


def count(text: str) -> int:
    """A whole number; ``4k`` is 4000 and ``4K`` 4096, as in vLLM."""
    match = re.fullmatch(r"(-?\d+)([kKmMgG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (16384, 16k, 16K)")
    base = 1000 if match[2].islower() else 1024
    return int(match[1]) * int(base ** " kmg".index(match[2].lower() or " "))


def size(text: str) -> int:
    """A number of bytes: ``512MiB``, ``512M`` (the same), ``512MB``, ``2G``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)(i?[bB]|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size (536870912, 512MiB, 2G)")
    base = 1000 if (match[3].lower() == "b" and match[2]) or (match[2].islower() and not match[3]) else 1024
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them: ``10,10,10``."""
    return tuple(count(part.strip()) for part in text.split(","))


def weights(text: str) -> tuple[int, ...] | str:
    """Whole numbers with commas between them, or ``auto``."""
    return text if text == "auto" else counts(text)


def _flag(names: str, field: str, help: str, parse: Callable[[str], Any] | None = str, **more: Any) -> Flag:
    section, _, name = field.partition(".")
    return Flag(names=tuple(names.split()), section=section, field=name, help=help, parse=parse, **more)


_DTYPES = (*DTYPES, *DTYPE_ALIASES)

GROUPS: dict[str, list[Flag]] = {
    "model": [
        _flag("--model", "model.model", "the same as MODEL", metavar="MODEL"),
        _flag("--tokenizer", "model.tokenizer", "folder or hub name, if it is not the model's", metavar="NAME"),
        _flag("--revision", "model.revision", "branch, tag or commit of a hub model", metavar="REV"),
        _flag("--dtype", "model.dtype", "auto is float32 on cpu, else the checkpoint's", choices=_DTYPES),
        _flag("--max-model-len", "model.max_model_len", "longest prompt plus output, in tokens", count, metavar="N"),
        _flag("--model-impl", "model.model_impl", "transformers: its own modules (slower)", choices=MODEL_IMPLS),
        _flag("--load-format", "model.load_format", "dummy: random weights from the config", choices=LOAD_FORMATS),
        _flag("--chat-template", "model.chat_template", "file or text, replaces the model's", metavar="T"),
        _flag("--served-model-name", "model.served_model_name", "names in the API", several=True, metavar="NAME"),
        _flag("--seed", "model.seed", "seed of requests that bring none", count, metavar="N"),
        _flag("--trust-remote-code", "model.trust_remote_code", "no effect: transformers' own models are served", None),
        _flag("--device --platform", "engine.platform", "auto, cpu, cuda, or another by entry point", metavar="NAME"),
        _flag("--max-logprobs", "model.max_logprobs", "most log-probabilities a token, -1: all", count, metavar="N"),
        _flag("--enforce-eager", "model.enforce_eager", "no CUDA graphs", None),
        _flag("--skip-tokenizer-init", "model.skip_tokenizer_init", "token ids in, token ids out", None),
    ],
    "parallel": [
        _flag("--tensor-parallel-size -tp", "parallel.tensor_parallel_size", "ranks per layer", count, metavar="N"),
        _flag("--tp-weights", "parallel.tp_weights", "their proportions, or auto", weights, metavar="N,N,.."),
        _flag("--pipeline-parallel-size -pp", "parallel.pipeline_parallel_size", "stages", count, metavar="N"),
        _flag("--pp-layer-partition", "parallel.pp_layer_partition", "layers of each stage", counts, metavar="N,N,.."),
        _flag("--data-parallel-size -dp", "parallel.data_parallel_size", "engines", count, metavar="N"),
        _flag("--data-parallel-size-local -dpl", "parallel.data_parallel_size_local", "those here", count, metavar="N"),
        _flag("--data-parallel-rank -dpn", "parallel.data_parallel_rank", "which one this is", count, metavar="N"),
        _flag(
            "--prefill-context-parallel-size -pcp",
            "parallel.prefill_context_parallel_size",
            "ranks that share a prompt",
            count,
            metavar="N",
        ),
        _flag(
            "--decode-context-parallel-size -dcp",
            "parallel.decode_context_parallel_size",
            "ranks that share a KV cache",
            count,
            metavar="N",
        ),
        _flag("--enable-expert-parallel", "parallel.enable_expert_parallel", "whole experts per rank", None),
        _flag("--all2all-backend", "parallel.all2all_backend", "how tokens come to experts", choices=ALL2ALL),
        _flag("--enable-eplb", "parallel.enable_eplb", "move experts to even out their load", None),
        _flag("--eplb-config", "parallel.eplb_config", "step_interval, num_redundant_experts ..", metavar="JSON"),
        _flag(
            "--distributed-executor-backend",
            "parallel.distributed_executor_backend",
            "uni, mp, ray, external_launcher, or a class by its dotted name",
            metavar="NAME",
        ),
        _flag("--nnodes -n", "parallel.nnodes", "machines", count, metavar="N"),
        _flag("--node-rank -r", "parallel.node_rank", "which machine this is", count, metavar="N"),
        _flag("--master-addr", "parallel.master_addr", "address of machine 0", metavar="HOST"),
        _flag("--master-port", "parallel.master_port", "its one known port", count, metavar="PORT"),
        _flag("--disable-custom-all-reduce", "parallel.disable_custom_all_reduce", "the library's own instead", None),
    ],
    "memory and batching": [
        _flag("--max-num-seqs", "scheduler.max_num_seqs", "most requests in a step", count, metavar="N"),
        _flag(
            "--max-num-batched-tokens", "scheduler.max_num_batched_tokens", "most tokens in a step", count, metavar="N"
        ),
        _flag("--enable-chunked-prefill", "scheduler.enable_chunked_prefill", "split long prompts over steps", None),
        _flag(
            "--max-num-prefill-tokens",
            "scheduler.max_num_prefill_tokens",
            "most prompt tokens in a step",
            count,
            metavar="N",
        ),
        _flag(
            "--long-prefill-token-threshold",
            "scheduler.long_prefill_token_threshold",
            "most of one prompt in a step",
            count,
            metavar="N",
        ),
        _flag(
            "--scheduling-policy",
            "scheduler.scheduling_policy",
            "fcfs, or priority: lower ones first",
            choices=POLICIES,
        ),
        _flag("--async-scheduling", "scheduler.async_scheduling", "plan a step ahead", None),
        _flag("--block-size", "cache.block_size", "tokens of a KV block", count, metavar="N"),
        _flag("--enable-prefix-caching", "cache.enable_prefix_caching", "share KV of equal beginnings", None),
        _flag(
            "--gpu-memory-utilization", "cache.gpu_memory_utilization", "share of a device's memory", float, metavar="X"
        ),
        _flag(
            "--kv-cache-memory-bytes", "cache.kv_cache_memory_bytes", "KV pool of a worker (512MiB)", size, metavar="N"
        ),
        _flag(
            "--num-gpu-blocks-override", "cache.num_gpu_blocks_override", "blocks of the KV pool", count, metavar="N"
        ),
    ],
    "processes": [
        _flag("--worker-cls", "process.worker_cls", "worker class by its dotted name", metavar="NAME"),
        _flag("--worker-extension-cls", "process.worker_extension_cls", "class mixed into it", metavar="NAME"),
        _flag(
            "--worker-start-method",
            "process.worker_start_method",
            "how workers are made",
            choices=("auto", *START_METHODS),
        ),
        _flag("--threads-per-worker", "process.threads_per_worker", "compute threads", count, metavar="N"),
        _flag("--cpu-bind", "process.cpu_bind", "cores of its own for each CPU worker", None),
        _flag("--numa-bind", "process.numa_bind", "on the CPUs and memory near their devices", None),
        _flag(
            "--numa-bind-nodes", "process.numa_bind_nodes", "node of each worker", count, several=True, metavar="NODE"
        ),
        _flag("--numa-bind-cpus", "process.numa_bind_cpus", "CPUs of each (0-3,8)", several=True, metavar="CPUS"),
        _flag("--mq-slots", "process.mq_slots", "slots of the ring for plans", count, metavar="N"),
        _flag("--mq-slot-bytes", "process.mq_slot_bytes", "size of one (64KiB)", size, metavar="N"),
        _flag("--mq-answer-slots", "process.mq_answer_slots", "slots of each ring for answers", count, metavar="N"),
        _flag("--mq-answer-slot-bytes", "process.mq_answer_slot_bytes", "size of one (16KiB)", size, metavar="N"),
        _flag("--mq-arena-bytes", "process.mq_arena_bytes", "large buffers of calls (40MiB)", size, metavar="N"),
        _flag("--mq-largest-bytes", "process.mq_largest_bytes", "largest call or answer (4GiB)", size, metavar="N"),
        _flag("--rpc-backlog-bytes", "process.rpc_backlog_bytes", "what calls may hold (1GiB)", size, metavar="N"),
        _flag("--start-timeout", "process.start_timeout_s", "longest start without progress", float, metavar="S"),
        _flag("--execute-model-timeout", "process.execute_timeout_s", "longest step", float, metavar="S"),
        _flag("--stall-timeout", "process.stall_timeout_s", "no progress for so long is a hang", float, metavar="S"),
        _flag("--long-wait", "process.long_wait_s", "waits that are explained", float, metavar="S"),
        _flag("--failure-grace", "process.failure_grace_s", "for all ranks to end a failed call", float, metavar="S"),
        _flag("--stop-timeout", "process.stop_timeout_s", "for a process to end before SIGTERM", float, metavar="S"),
        _flag("--distributed-timeout", "parallel.distributed_timeout_s", "longest collective", float, metavar="S"),
        _flag(
            "--cpu-distributed-timeout",
            "parallel.cpu_distributed_timeout_s",
            "longest one of CPU groups (the same)",
            float,
            metavar="S",
        ),
        _flag("--log-level", "process.log_level", "of drumline's own lines", choices=LOG_LEVELS),
        _flag("--log-dir", "process.log_dir", "a file for each process goes there", metavar="DIR"),
    ],
    "server": [
        _flag("--host", "server.host", "address to listen on (127.0.0.1)", metavar="HOST"),
        _flag("--port", "server.port", "port (8000; 0: any free one)", count, metavar="PORT"),
        _flag(
            "--api-key",
            "server.api_key",
            "keys of clients ($DRUMLINE_API_KEY)",
            several=True,
            metavar="KEY",
        ),
        _flag("--drain-lag", "server.drain_lag_s", "for new requests after SIGTERM (5)", float, metavar="S"),
        _flag(
            "--shutdown-timeout", "server.shutdown_timeout_s", "for running ones after that (20)", float, metavar="S"
        ),
        _flag("--api-server-count -asc", "server.api_server_count", "processes that speak HTTP", count, metavar="N"),
        _flag("--recovery", "server.recovery", "start a dead engine again, requests go on (on)", choices=SWITCH),
        _flag("--recovery-restarts", "server.recovery_restarts", "most in a window (3)", count, metavar="N"),
        _flag("--recovery-window", "server.recovery_window_s", "seconds of a window (600)", float, metavar="S"),
        _flag("--recovery-backoff", "server.recovery_backoff_s", "before the second one (1)", float, metavar="S"),
    ],
}

LATER_SWITCHES = ("--headless", "--data-parallel-hybrid-lb", "--data-parallel-external-lb")
LATER_VALUES = (
    "--data-parallel-address",
    "--data-parallel-rpc-port",
    "--data-parallel-start-rank",
    "--data-parallel-backend",
)
"""Known names without a field of the configuration yet."""


class Parser(argparse.ArgumentParser):
    """argparse with both spellings of a flag, one-line errors, and the nearest name for an unknown one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, after ``--a_b`` became ``--a-b``."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_dashes(arg) for arg in given], namespace)

    def error(self, message: str) -> NoReturn:
        """Two lines and exit code 2."""
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}\nTry: {self.prog} --help\n")

    def unknown(self, args: Sequence[str]) -> NoReturn:
        """Say which flags exist nearby."""
        flags = [name for action in self._actions for name in action.option_strings]
        said = []
        for arg in args:
            if arg.startswith("-"):
                name = arg.partition("=")[0]
                near = difflib.get_close_matches(name, flags, n=1, cutoff=0.6)
                said.append(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else ""))
        self.error("; ".join(said) or f"unexpected argument {args[0]!r}")


class _Help(argparse.HelpFormatter):
    """Names on the left, one line of help on the right."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=min(shutil.get_terminal_size().columns, 120))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        if not names:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else " " + self._format_args(action, str(action.metavar or action.dest.upper()))
        if action.choices is not None:
            value = " {" + ",".join(action.choices) + "}"
        return ", ".join(names) + value


def _dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def add_flags(parser: argparse.ArgumentParser, *, server: bool = True) -> None:
    """Add MODEL and every flag. ``server``: those of the HTTP server too."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name; none: the embedded model")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.section != "server" or server or flag.field == "api_server_count":
                _add(group, flag)
    for name in LATER_SWITCHES:
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in LATER_VALUES:
        parser.add_argument(name, help=argparse.SUPPRESS)


def _add(group: Any, flag: Flag) -> None:
    more: dict[str, Any] = {"dest": f"{flag.section}.{flag.field}", "default": None, "help": flag.help}
    if flag.parse is None:
        group.add_argument(*flag.names, action=argparse.BooleanOptionalAction, **more)
    elif flag.field == "api_key":
        # Not a list of words: the next one may be MODEL.
        group.add_argument(*flag.names, action="append", metavar=flag.metavar, **more)
    elif flag.several:
        group.add_argument(*flag.names, type=flag.parse, nargs="+", action="extend", metavar=flag.metavar, **more)
    else:
        group.add_argument(*flag.names, type=flag.parse, choices=flag.choices, metavar=flag.metavar, **more)


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse; unknown flags end the command with exit code 2."""
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.unknown(unknown)
    assert isinstance(namespace, argparse.Namespace)
    return namespace


def configs(namespace: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The configuration that the flags ask for. ConfigError if it cannot work."""
    given: dict[str, dict[str, Any]] = {section: {} for section in (*SECTIONS, "engine")}
    for name, value in vars(namespace).items():
        section, dot, field = name.partition(".")
        if dot and value is not None:
            given[section][field] = tuple(value) if isinstance(value, list) else value
    tag = namespace.model_tag
    if tag is not None and given["model"].setdefault("model", tag) != tag:
        raise ConfigError("MODEL and --model name different models; give one of them.")
    if not given["server"].get("api_key") and os.environ.get("DRUMLINE_API_KEY"):
        given["server"]["api_key"] = (os.environ["DRUMLINE_API_KEY"],)
    made = {section: kind(**given[section]) for section, kind in SECTIONS.items()}
    server = made.pop("server")
    return EngineConfig(**made, **given["engine"]), server


def refuse_unbuilt(namespace: argparse.Namespace, config: EngineConfig, server: ServerConfig) -> None:
    """ConfigError for what ``plan`` knows and ``serve`` cannot do yet, before any process."""
    parallel = config.parallel
    asked = [
        name
        for name, value in (
            ("--data-parallel-size", parallel.data_parallel_size > 1),
            ("--nnodes", parallel.nnodes > 1),
            ("--api-server-count", server.api_server_count > 1),
        )
        if value
    ]
    if parallel.distributed_executor_backend in ("ray", "external_launcher"):
        asked.append(f"--distributed-executor-backend {parallel.distributed_executor_backend}")
    asked += [name for name in LATER_SWITCHES if getattr(namespace, name[2:].replace("-", "_"), False)]
    asked += [name for name in LATER_VALUES if getattr(namespace, name[2:].replace("-", "_"), None) is not None]
    if asked:
        raise ConfigError(
            f"not built yet: {', '.join(asked)}. Today one machine serves, with --tensor-parallel-size N, "
            "--pipeline-parallel-size N, --prefill-context-parallel-size N and --decode-context-parallel-size N."
        )
