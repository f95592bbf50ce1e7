"""What facts about a machine mean. Pure: the same facts give the same findings."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline.cli.doctor.facts import Facts

MIB, GIB = 1 << 20, 1 << 30
WORKER_BYTES = 400 * MIB
"""About what a worker takes besides weights and KV cache."""
TASKS_PER_PROCESS = 12
"""Threads of one process, roughly."""
FIRST_DAY = 1_750_000_000
"""A clock before this is wrong."""
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
OUTER_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing about the machine, and what to do about it."""

    topic: str
    level: Level
    message: str
    do: str = ""
    """Empty: nothing."""

    def text(self) -> str:
        """One line, and one more for what to do."""
        line = f"{self.topic:<10} {self.level:<8} {self.message}"
        return f"{line}\n{'':<10} {'':<8} -> {self.do}" if self.do else line


def findings(facts: Facts) -> list[Finding]:
    """Everything that is to be said, by topic; each topic has at least one finding."""
    topics = (_flags, _devices, _peers, _memory, _cgroup, _cores, _limits, _addresses, _versions, _folders, _clock)
    return [found for topic in topics for found in topic(facts)]


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def _flags(facts: Facts) -> Iterator[Finding]:
    for why in facts.refusals:
        yield Finding("flags", Level.ERROR, why, "change the flags as it says; nothing would be started")
    if not facts.refusals:
        yield Finding("flags", Level.OK, "serve takes them")


def _devices(facts: Facts) -> Iterator[Finding]:
    if facts.devices_late:
        yield Finding(
            "devices",
            Level.WARNING,
            "the GPU driver did not answer in time",
            "try nvidia-smi; if that takes seconds too, switch persistence mode on (nvidia-smi -pm 1)",
        )
    if facts.refusal:
        yield Finding("devices", Level.ERROR, facts.refusal, "change the flags as it says; nothing would be started")
    if facts.driver_present and not facts.accelerator:
        why = "torch is its CPU build" if facts.torch_is_cpu_build else "none is visible (CUDA_VISIBLE_DEVICES)"
        do = "install a CUDA build of torch" if facts.torch_is_cpu_build else "look at CUDA_VISIBLE_DEVICES"
        yield Finding("devices", Level.WARNING, f"there is a GPU driver, but {why}: the CPU is used", do)
    if not facts.accelerator:
        yield Finding("devices", Level.OK, f"{facts.platform}: no devices are needed")
        return
    used = facts.devices[: facts.workers]
    for device in facts.devices:
        free = "" if device.free is None else f", {_size(device.free)} free"
        yield Finding(
            "devices", Level.OK, f"{facts.platform}:{device.index} {device.name}, {_size(device.memory)}{free}"
        )
    for device in used:
        if device.free is not None and device.memory and device.free < 0.8 * device.memory:
            taken = _size(device.memory - device.free)
            yield Finding(
                "devices",
                Level.WARNING,
                f"device {device.index} has {taken} in use already",
                "end what uses it (nvidia-smi lists it), choose others with CUDA_VISIBLE_DEVICES, or lower "
                "--gpu-memory-utilization",
            )
    if len({device.name for device in used}) > 1:
        yield Finding(
            "devices",
            Level.NOTE,
            "the devices are of different kinds: the slowest sets the pace",
            "choose like ones with CUDA_VISIBLE_DEVICES",
        )
    if facts.weights is not None and used and all(device.free is not None for device in used):
        share = facts.weights / len(used)
        short = [device for device in used if device.free is not None and device.free < share]
        if short:
            yield Finding(
                "devices",
                Level.ERROR,
                f"each worker's share of the weights is {_size(share)}; device {short[0].index} has "
                f"{_size(short[0].free or 0)} free",
                "use more devices (--tensor-parallel-size, --pipeline-parallel-size), or free some memory",
            )


def _peers(facts: Facts) -> Iterator[Finding]:
    if not facts.accelerator or facts.workers < 2:
        yield Finding("peers", Level.OK, "one device, or none: nothing to reach")
        return
    if not facts.peers:
        yield Finding(
            "peers",
            Level.NOTE,
            "the driver does not tell whether devices reach each other",
            "see nvidia-smi topo -p2p r",
        )
        return
    bad = {pair: why for pair, why in facts.peers.items() if why != "ok"}
    for pair, why in bad.items():
        yield Finding(
            "peers",
            Level.WARNING,
            f"devices {pair.replace('-', ' and ')} cannot reach each other's memory ({why}): it goes over the host",
            "on virtual machines and with an IOMMU this is usual; if NCCL hangs at its start set NCCL_P2P_DISABLE=1",
        )
    if not bad:
        yield Finding("peers", Level.OK, "all devices reach each other's memory")


def _memory(facts: Facts) -> Iterator[Finding]:
    available = facts.memory_available
    needed = facts.workers * WORKER_BYTES + (0 if facts.accelerator else facts.weights or 0)
    what = f"{_size(available)} available of {_size(facts.memory_limit or facts.memory_total)}"
    if available and available < needed:
        yield Finding(
            "memory",
            Level.ERROR if facts.weights is not None else Level.WARNING,
            f"{what}, but {facts.workers} workers need about {_size(needed)} before any KV cache",
            "fewer workers, a smaller model, --dtype bfloat16, or more memory (a container: --memory)",
        )
    else:
        yield Finding("memory", Level.OK, what)
    if facts.overcommit == 2:
        yield Finding(
            "memory",
            Level.WARNING,
            "vm.overcommit_memory is 2: address space counts as memory, and drumline maps much that it never touches",
            "sysctl vm.overcommit_memory=0",
        )
    if facts.oom_kills:
        yield Finding(
            "memory",
            Level.WARNING,
            f"the kernel has killed {facts.oom_kills} processes of this control group for want of memory so far",
            "raise the limit of the container, or run less in it",
        )
    if facts.accelerator and facts.workers > 1 and facts.shm_free is not None and facts.shm_free < 64 * MIB:
        yield Finding(
            "memory",
            Level.WARNING,
            f"/dev/shm has {_size(facts.shm_free)} free: NCCL puts its buffers there (drumline itself nothing)",
            "a larger one (a container: --shm-size=1g)",
        )


def _cgroup(facts: Facts) -> Iterator[Finding]:
    limits = []
    if facts.memory_limit is not None:
        limits.append(f"{_size(facts.memory_limit)} of {_size(facts.memory_total)}")
    if facts.cpu_quota is not None:
        limits.append(f"{facts.cpu_quota:g} of {facts.cores_online} cores")
    if facts.tasks_left is not None:
        limits.append(f"{facts.tasks_left} more processes and threads")
    said = ", ".join(limits) or "no limits"
    yield Finding("cgroup", Level.OK, f"control groups {facts.cgroups}: {said}" if facts.cgroups else "none")
    needed = TASKS_PER_PROCESS * facts.processes
    if facts.tasks_left is not None and facts.tasks_left < needed:
        yield Finding(
            "cgroup",
            Level.ERROR if facts.tasks_left < 4 * facts.processes else Level.WARNING,
            f"only {facts.tasks_left} more processes and threads may be made; {facts.processes} processes need about "
            f"{needed}",
            "raise pids.max of the control group (a container: --pids-limit) or ulimit -u",
        )
    if facts.cpu_quota is not None and facts.cpu_quota < 1:
        yield Finding(
            "cgroup",
            Level.WARNING,
            f"the quota of {facts.cpu_quota:g} cores stops everything for a part of each period: tokens stutter",
            "raise cpu.max (v1: cpu.cfs_quota_us; a container: --cpus) to at least one core",
        )


def _cores(facts: Facts) -> Iterator[Finding]:
    threads = facts.threads_per_worker or (int(facts.omp_threads) if facts.omp_threads.isdecimal() else 0)
    share = max(1, facts.cores // facts.workers)
    count = threads or share
    yield Finding(
        "cores",
        Level.OK,
        f"{facts.cores} usable (online {facts.cores_online}, affinity {facts.cores_affinity}"
        + (f", quota {facts.cpu_quota:g}" if facts.cpu_quota is not None else "")
        + f"); {facts.workers} workers with {count} compute threads each",
    )
    if facts.omp_threads and not facts.omp_threads.split(",")[0].strip().isdecimal():
        yield Finding(
            "cores", Level.ERROR, f"OMP_NUM_THREADS={facts.omp_threads} is no number", "set it to one, or unset it"
        )
    if not facts.accelerator and facts.workers > facts.cores:
        yield Finding(
            "cores",
            Level.WARNING,
            f"{facts.workers} workers compute on {facts.cores} cores: they wait for each other in every layer",
            f"--tensor-parallel-size x --pipeline-parallel-size of at most {facts.cores}",
        )
    elif threads * facts.workers > facts.cores:
        yield Finding(
            "cores",
            Level.WARNING,
            f"{facts.workers} workers with {threads} threads each are more than {facts.cores} cores",
            f"OMP_NUM_THREADS={share}, or leave it out",
        )
    if facts.load > facts.cores:
        yield Finding(
            "cores",
            Level.NOTE,
            f"the machine is busy: a load of {facts.load:.1f} on {facts.cores} cores",
            "OMP_NUM_THREADS=1 is many times faster beside busy neighbours",
        )


def _limits(facts: Facts) -> Iterator[Finding]:
    soft, hard = facts.open_files
    least, wanted = 64 + 16 * facts.workers, 4096
    shown = "without limit" if soft < 0 else str(soft)
    if 0 <= soft < least:
        yield Finding("files", Level.ERROR, f"{soft} open files; {least} are needed", f"ulimit -n {wanted}")
    elif 0 <= soft < wanted:
        high = "" if hard < 0 or hard >= wanted else f" (hard limit {hard}: raise that first)"
        yield Finding(
            "files",
            Level.NOTE,
            f"open files: {shown}, so at most about {soft - least} clients at once",
            f"ulimit -n {wanted}{high} if there will be more",
        )
    else:
        yield Finding("files", Level.OK, f"open files: {shown}")


def _addresses(facts: Facts) -> Iterator[Finding]:
    where = f"{facts.host} port {facts.port}"
    if facts.port_refusal:
        holder = f" It is held by {facts.port_holder}." if facts.port_holder else ""
        yield Finding("addresses", Level.ERROR, facts.port_refusal + holder, "another --port, or end who has it")
    else:
        yield Finding("addresses", Level.OK, f"{where} can be had")
    if facts.everybody:
        yield Finding(
            "addresses",
            Level.WARNING,
            f"--host {facts.host} without --api-key: everybody who reaches this port may use the model",
            "--api-key KEY (or $DRUMLINE_API_KEY), or --host 127.0.0.1",
        )
    if not facts.loopback:
        yield Finding(
            "addresses",
            Level.ERROR if facts.accelerator and facts.workers > 1 else Level.WARNING,
            "the loopback interface cannot be used (NCCL's ranks meet there)",
            "ip link set lo up",
        )
    for name in facts.late:
        yield Finding("addresses", Level.NOTE, f"no answer in time: {name}", "if the start hangs, look there first")


def _versions(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 11):
        yield Finding("versions", Level.ERROR, f"Python {_dotted(facts.python)}", "Python 3.11 or newer")
    for name in facts.missing_calls:
        yield Finding(
            "versions",
            Level.ERROR,
            f"the kernel ({facts.kernel}) or its sandbox refuses {name}",
            "Linux 5.3 or newer; in a container a seccomp profile that allows it",
        )
    bad = False
    for name, wanted in facts.requirements.items():
        version = facts.versions.get(name, "")
        if not version:
            bad = True
            yield Finding("versions", Level.ERROR, f"{name} is not installed", f"pip install '{name}{wanted}'")
        elif not satisfies(version, wanted):
            bad = True
            yield Finding(
                "versions", Level.WARNING, f"{name} {version}, tried with {wanted}", f"pip install '{name}{wanted}'"
            )
    if not bad:
        shown = [
            f"{name} {facts.versions[name]}" for name in ("drumline", "torch", "transformers") if name in facts.versions
        ]
        yield Finding("versions", Level.OK, ", ".join([f"Python {_dotted(facts.python)}", *shown, facts.kernel]))
    outer = sorted(name for name in OUTER_JOB if name in facts.environment)
    if outer:
        yield Finding(
            "versions", Level.NOTE, f"{', '.join(outer)} of an outer job are set: drumline does not read them"
        )


def _folders(facts: Facts) -> Iterator[Finding]:
    for folder, free in facts.folders.items():
        if free is None:
            yield Finding(
                "folders",
                Level.WARNING,
                f"{folder} cannot be written to",
                "make it writable, or set XDG_STATE_HOME, XDG_CACHE_HOME or --log-dir",
            )
        elif free < GIB:
            yield Finding("folders", Level.WARNING, f"{folder} has {_size(free)} free", "make room there")
    if all(free is not None and free >= GIB for free in facts.folders.values()):
        yield Finding("folders", Level.OK, ", ".join(facts.folders) + ": writable, with room")


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.time < FIRST_DAY:
        yield Finding("clock", Level.WARNING, "the date is wrong: TLS and log files will be", "set it (ntp, chrony)")
    if facts.clock_source in SLOW_CLOCKS:
        yield Finding(
            "clock",
            Level.WARNING,
            f"the clock source is {facts.clock_source}: each look at the clock takes microseconds",
            "boot with clocksource=tsc, or see why the kernel distrusts it (dmesg)",
        )
    if facts.clock_synchronised is False:
        yield Finding(
            "clock",
            Level.NOTE,
            "no time server keeps the clock: times of several machines will not agree",
            "ntp, chrony",
        )
    if facts.time >= FIRST_DAY and facts.clock_source not in SLOW_CLOCKS:
        yield Finding("clock", Level.OK, f"source {facts.clock_source or 'unknown'}")


def satisfies(version: str, wanted: str) -> bool:
    """Whether ``2.13.0+cpu`` is within ``>=2.11,<3``. Only numbers are compared."""
    have = _numbers(version)
    for clause in filter(None, (part.strip() for part in wanted.split(","))):
        match = re.match(r"(>=|<=|==|!=|<|>|~=)\s*([\w.]+)", clause)
        if match is None:
            continue
        bound = _numbers(match[2])
        mine = have[: len(bound)] if match[1] in ("==", "<=") else have
        ok = {
            ">=": have >= bound,
            "~=": have >= bound and have[: len(bound) - 1] == bound[:-1],
            ">": mine > bound,
            "<": mine < bound,
            "<=": mine <= bound,
            "==": mine == bound,
            "!=": mine != bound,
        }[match[1]]
        if not ok:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
