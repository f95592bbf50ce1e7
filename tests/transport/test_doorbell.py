"""Doorbells and waiters between real processes and threads: nothing lost, nothing spent."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from drumline.errors import ChannelClosedError, TransportError
from drumline.transport import Doorbell, SharedMemory, Waiter, doorbell
from drumline.transport.doorbell import futex_number, ring_all
from drumline.transport.fence import _pool, fence, fences_of
from drumline.transport.native import NO_NATIVE_VARIABLE
from drumline.transport.spin import SpinPredictor

from .procs import children


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize(
    ("machine", "bits", "number"),
    [
        ("x86_64", 64, 202),
        ("aarch64", 64, 98),
        ("riscv64", 64, 98),
        ("ppc64le", 64, 221),
        ("s390x", 64, 238),
        ("i686", 32, 240),
        ("x86_64", 32, 240),  # a 32-bit Python on a 64-bit kernel: the process's table counts
        ("armv7l", 32, 240),
        ("aarch64", 32, 240),
    ],
)
def test_numbers_of_known_machines(machine: str, bits: int, number: int) -> None:
    assert futex_number("linux", machine, bits) == number


@pytest.mark.parametrize(
    ("system", "machine", "bits"), [("linux", "vax", 64), ("darwin", "arm64", 64), ("linux", "riscv32", 32)]
)
def test_a_clear_error_where_there_is_no_futex(system: str, machine: str, bits: int) -> None:
    with pytest.raises(TransportError, match=f"Linux on aarch64, .*; this is {system} on {machine}, {bits}-bit"):
        futex_number(system, machine, bits)


def test_ringer_ids() -> None:
    memory = SharedMemory.create(64)
    for bad in (-1, 256):
        with pytest.raises(ValueError, match="0 to 255"):
            Doorbell(memory, bad)
    memory.close()


def test_ringers_never_write_the_same_value() -> None:
    memory = SharedMemory.create(64)
    bells = [Doorbell(memory, i) for i in (0, 1, 255)]
    values = set()
    for _ in range(300):
        for bell in bells:
            bell.ring()
            values.add(bell.value())
    assert len(values) == 900
    for bell in bells:
        bell.close()
    memory.close()


class Preempted:
    """The words of a doorbell whose ringer loses the CPU just before it stores."""

    def __init__(self, words: memoryview, meanwhile: Callable[[], None]) -> None:
        self._words = words
        self._meanwhile = meanwhile

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._meanwhile()
        self._words[index] = value


def test_a_ringer_that_loses_the_cpu_never_brings_back_what_the_waiter_has_seen() -> None:
    """With a plain increment both ringers would store the same value, and the waiter sleep on it."""
    memory = SharedMemory.create(64)
    first, second = Doorbell(memory, 1), Doorbell(memory, 2)
    words, seen = first.words, []

    def meanwhile() -> None:
        seen.append(second.value())
        for _ in range(3):
            second.ring()
            seen.append(second.value())

    first.words = Preempted(words, meanwhile)  # type: ignore[assignment]
    for _ in range(3):
        first.ring()
        assert second.value() not in seen
    first.words = words
    first.close()
    second.close()
    memory.close()


@pytest.mark.parametrize("moment", ["after the look", "before the look"])
def test_what_changes_around_the_look_is_not_slept_over(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    waiter = Waiter.create()
    box: list[int] = []

    def change() -> None:
        if not box:
            box.append(1)
            waiter.ring()

    def check() -> int | None:
        found = box[0] if box else None
        if moment == "after the look":
            change()
        return found

    if moment == "before the look":
        monkeypatch.setattr("drumline.transport.waiter.order", change)
    start = time.monotonic()
    assert waiter.wait(check, soon()) == 1
    assert time.monotonic() - start < 2
    assert waiter.lost_wakes == 0
    waiter.close()


def test_a_successor_with_the_same_id_does_not_repeat_its_predecessor() -> None:
    # with counters from 0 the first ring of the second would leave the word as it is
    memory = SharedMemory.create(64)
    values = []
    for _ in range(20):
        bell = Doorbell(memory, 3)
        bell.ring()
        values.append(bell.value())
        bell.close()
    assert len(set(values)) == 20
    memory.close()


def test_counter_wraps_within_24_bits() -> None:
    memory = SharedMemory.create(64)
    bell = Doorbell(memory, 9)
    bell.parts = bell.words, itertools.count(0xFFFFFF09, 256), bell._wake
    bell._counter = bell.parts[1]
    seen = []
    for _ in range(3):
        bell.ring()
        seen.append(bell.value())
    assert seen == [0xFFFFFF09, 0x00000009, 0x00000109]
    bell.close()
    memory.close()


def test_wait_returns_at_once_if_the_word_has_changed_and_sleeps_if_not() -> None:
    waiter = Waiter.create()
    bell = waiter.ringer(1)
    old = bell.value()
    bell.ring()
    start = time.monotonic()
    bell.wait(old, 10)
    assert time.monotonic() - start < 5
    start = time.monotonic()
    bell.wait(bell.value(), 0.05)
    assert time.monotonic() - start > 0.04
    bell.wait(bell.value(), 0)
    bell.wait(bell.value(), -3)
    bell.close()
    waiter.close()


def test_deadline_and_result() -> None:
    waiter = Waiter.create()
    calls: list[int] = []
    assert waiter.wait(lambda: calls.append(1), time.monotonic() + 0.05) is None
    assert len(calls) == 2  # before the sleep and after it
    assert waiter.wait(lambda: 0, time.monotonic() - 1) == 0
    assert waiter.wait(lambda: None, time.monotonic() - 1) is None
    waiter.close()


def test_own_threads_wake_it() -> None:
    waiter = Waiter.create()
    box: list[str] = []

    def work() -> None:
        box.append("done")
        waiter.ring()

    thread = threading.Timer(0.05, work)
    thread.start()
    assert waiter.wait(lambda: box[0] if box else None, soon()) == "done"
    thread.join()
    assert waiter.lost_wakes == 0
    waiter.close()


def test_several_threads_wait_on_one_bell() -> None:
    waiter = Waiter.create()
    box: list[int] = []
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.append(waiter.wait(lambda: box[0] if box else None, soon()) or 0))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    box.append(5)
    waiter.ring()
    for thread in threads:
        thread.join(10)
    assert got == [5, 5, 5]
    waiter.close()


def test_a_death_source_is_a_check_that_raises() -> None:
    waiter = Waiter.create()
    dead = threading.Event()

    def check() -> None:
        if dead.is_set():
            raise ChildProcessError("worker 3 is gone")

    def supervisor() -> None:
        dead.set()
        waiter.ring()

    thread = threading.Timer(0.05, supervisor)
    thread.start()
    start = time.monotonic()
    with pytest.raises(ChildProcessError, match="worker 3"):
        waiter.wait(check, soon())
    assert time.monotonic() - start < 2
    thread.join()
    waiter.close()


def test_signal_handlers_run_during_a_wait_and_may_ring() -> None:
    waiter = Waiter.create()
    noted: list[int] = []

    def handler(number: int, _frame: Any) -> None:
        noted.append(number)
        waiter.ring()

    previous = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        thread.start()
        start = time.monotonic()
        assert waiter.wait(lambda: noted[0] if noted else None, soon()) == signal.SIGUSR1
        assert time.monotonic() - start < 3
        assert waiter.lost_wakes == 0
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, previous)
        waiter.close()


def test_a_handler_that_only_notes_is_enough_and_one_that_raises_ends_the_wait() -> None:
    waiter = Waiter.create()
    noted: list[int] = []

    def raising(_number: int, _frame: Any) -> None:
        raise InterruptedError("stop")

    for handler in (lambda number, _frame: noted.append(number), raising):
        previous = signal.signal(signal.SIGUSR1, handler)
        thread = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        try:
            thread.start()
            start = time.monotonic()
            if handler is raising:
                with pytest.raises(InterruptedError):
                    waiter.wait(lambda: None, soon())
            else:
                assert waiter.wait(lambda: noted[0] if noted else None, soon()) == signal.SIGUSR1
            assert time.monotonic() - start < 3
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, previous)
    assert waiter.lost_wakes == 0
    waiter.close()


@pytest.mark.alone
def test_deadlines_hold_under_signals_all_the_time() -> None:
    """What is left is computed anew after each EINTR: neither longer nor shorter, and every handler runs."""
    waiter = Waiter.create()
    noted: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _frame: noted.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        begin = time.monotonic()
        assert waiter.wait(lambda: None, begin + 0.4) is None
        took = time.monotonic() - begin
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert 0.4 <= took < 1
    assert len(noted) > 50
    waiter.close()


def test_many_signals_lose_nothing() -> None:
    """A timer interrupts the waits all the time while a child rings."""
    waiter, other = Waiter.create("parent"), Waiter.create("child")
    memory = SharedMemory.create(128)
    words = memory.buf.cast("I")

    def child() -> None:
        me, bell = Waiter.attach(other.fd), Doorbell.attach(waiter.fd, 1)
        for number in range(1, 1001):
            words[0] = number
            bell.ring()
            assert me.wait(lambda n=number: words[16] == n or None, soon())

    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    bell = other.ringer(1)
    try:
        with children() as start:
            process = start(child)
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            for number in range(1, 1001):
                assert waiter.wait(lambda n=number: words[0] == n or None, soon())
                words[16] = number
                bell.ring()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert process.join() == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert waiter.lost_wakes == 0
    words.release()
    bell.close()
    waiter.close()
    other.close()
    memory.close()


def _ring_many(waiter: Waiter, memory: SharedMemory, ringer: int, rounds: int) -> None:
    """Raise the own counter, ring, and wait until the waiter has acknowledged it: each round could lose a wake."""
    bell = Doorbell.attach(waiter.fd, ringer)
    words = memory.buf.cast("I")
    for number in range(1, rounds + 1):
        words[16 * ringer] = number
        bell.ring()
        until = time.monotonic() + 20
        while words[16 * ringer + 1] != number:
            os.sched_yield()
            assert time.monotonic() < until, f"ring {number} of ringer {ringer} was lost"


def test_racing_ringers_lose_nothing() -> None:
    """Three processes and two threads ring one bell; the waiter never finds anything by looking again after 5 s."""
    rounds, n_processes, n_threads = 1500, 3, 2
    waiter = Waiter.create()
    memory = SharedMemory.create(64 * 8)
    words = memory.buf.cast("I")
    local: list[int] = [0] * n_threads
    done = [0] * n_threads

    def own_thread(index: int) -> None:
        for number in range(1, rounds // 5 + 1):
            local[index] = number
            waiter.ring()
            until = time.monotonic() + 20
            while done[index] != number:
                time.sleep(0)
                assert time.monotonic() < until

    def check() -> int | None:
        found = 0
        for ringer in range(1, n_processes + 1):
            value = words[16 * ringer]
            if value != words[16 * ringer + 1]:
                words[16 * ringer + 1] = value
                found += 1
        for index in range(n_threads):
            if local[index] != done[index]:
                done[index] = local[index]
                found += 1
        return found or None

    with children() as start:
        ringers = [start(_ring_many, waiter, memory, i, rounds) for i in range(1, n_processes + 1)]
        threads = [threading.Thread(target=own_thread, args=(i,)) for i in range(n_threads)]
        for thread in threads:
            thread.start()
        left = rounds * n_processes + rounds // 5 * n_threads
        while left:
            found = waiter.wait(check, soon(30))
            assert found, f"{left} rings never came"
            left -= found
        for thread in threads:
            thread.join(10)
        assert [child.join() for child in ringers] == [0] * n_processes
    assert waiter.lost_wakes == 0
    words.release()
    waiter.close()
    memory.close()


def test_lost_wakes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter that other tests hold at 0 does count: a change without a ring."""
    monkeypatch.setattr("drumline.transport.waiter.RECHECK_S", 0.05)
    waiter = Waiter.create()
    calls: list[int] = []

    def check() -> bool | None:
        calls.append(1)
        return True if len(calls) == 3 else None

    assert waiter.wait(check, soon())
    assert waiter.lost_wakes == 1
    waiter.close()


def test_no_two_sleeps_are_cut_after_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fell asleep at the same message must not look again at the same time, nor when the next one comes."""
    monkeypatch.setattr("drumline.transport.waiter.RECHECK_S", 0.01)
    slept: list[float] = []

    def wait(bell: Doorbell, seen: int, timeout: float) -> bool:
        slept.append(timeout)
        return True

    monkeypatch.setattr(Doorbell, "wait", wait)
    waiter = Waiter.create()
    waiter.predictor = None
    assert waiter.wait(lambda: True if len(slept) == 20 else None, soon())
    assert all(0.8 * 0.01 <= one <= 0.01 for one in slept)
    assert len(set(slept)) == 20
    others = [Waiter.attach(waiter.fd) for _ in range(20)]
    assert len({one.recheck_s for one in others}) == 20
    for one in others:
        one.close()
    waiter.close()


class Watch(SpinPredictor):
    """Always watches for so long, after a nap."""

    def __init__(self, nap_ns: int, watch_ns: int) -> None:
        super().__init__()
        self.nap_ns, self.watch_ns = nap_ns, watch_ns
        self.seen: list[bool] = []

    def plan(self, start: int) -> tuple[int, int]:
        return (start + self.nap_ns if self.nap_ns else 0), start + self.nap_ns + self.watch_ns

    def watched(self, ns: int, hit: bool) -> None:
        self.seen.append(hit)


@pytest.mark.parametrize("nap_ns", [0, 2_000_000])
def test_watching_sees_a_ring(nap_ns: int) -> None:
    waiter = Waiter.create()
    waiter.predictor = predictor = Watch(nap_ns, 10_000_000_000)
    box: list[int] = []
    thread = threading.Timer(0.02, lambda: (box.append(1), waiter.ring()))
    thread.start()
    assert waiter.wait(lambda: box[0] if box else None, soon()) == 1
    thread.join()
    assert predictor.seen == [True]
    assert waiter.lost_wakes == 0
    waiter.close()


def test_naps_end_on_time() -> None:
    """In whatever thread; one that takes none keeps its slack."""
    waiter = Waiter.create()
    waiter.predictor = Watch(500_000, 1)
    slack: list[int] = []

    libc = ctypes.CDLL(None)

    def note(naps: bool) -> None:
        libc.prctl(29, ctypes.c_ulong(50_000), 0, 0, 0)  # PR_SET_TIMERSLACK: threads inherit it
        if naps:
            waiter.wait(lambda: None, time.monotonic() + 0.002)
        slack.append(libc.prctl(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK

    for naps in (False, True, True):
        thread = threading.Thread(target=note, args=(naps,))
        thread.start()
        thread.join(10)
    assert slack == [50_000, 1000, 1000]
    waiter.close()


@pytest.mark.parametrize("nap_ns", [0, 2_000_000])
def test_watching_in_vain_ends_in_one_sleep(nap_ns: int) -> None:
    waiter = Waiter.create()
    waiter.predictor = predictor = Watch(nap_ns, 3_000_000)
    looks: list[int] = []
    assert waiter.wait(lambda: looks.append(1), time.monotonic() + 0.3) is None
    assert predictor.seen == [False]
    assert len(looks) <= 4  # first, after the watch, after the sleep; and one more for a clock that is a little off
    waiter.close()


def test_what_a_handler_notes_during_a_watch_is_not_slept_over() -> None:
    waiter = Waiter.create()
    waiter.predictor = Watch(0, 400_000_000)
    noted: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _frame: noted.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        begin = time.monotonic()
        assert waiter.wait(lambda: noted[0] if noted else None, soon()) == signal.SIGALRM
        assert time.monotonic() - begin < 3
    finally:
        signal.signal(signal.SIGALRM, previous)
    waiter.close()


def test_only_one_thread_watches() -> None:
    waiter = Waiter.create()
    waiter.predictor = predictor = Watch(0, 50_000_000)
    threads = [threading.Thread(target=waiter.wait, args=(lambda: None, time.monotonic() + 0.2)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert 1 <= len(predictor.seen) <= 2  # the second once the first had finished, if it began that late
    waiter.close()


@pytest.fixture(params=["machine code", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How bells that the test makes sleep."""
    monkeypatch.setenv(NO_NATIVE_VARIABLE, "0" if request.param == "machine code" else "1")
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_a_sleeper_says_so_and_a_ring_then_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that nobody sleeps for make no call; while any thread sleeps they do."""
    calls: list[object] = []
    wake = doorbell.wake_call
    monkeypatch.setattr(doorbell, "wake_call", lambda *arguments: (calls.append(1), wake(*arguments)))
    waiter = Waiter.create()
    bell = waiter.ringer(1)
    bell.ring()
    ring_all([bell, bell])
    assert not calls
    box: list[int] = []
    threads = [threading.Thread(target=waiter.wait, args=(lambda: box or None, soon())) for _ in range(2)]
    for thread in threads:
        thread.start()
    until = soon()
    while waiter._bell.sleepers < 2:
        assert time.monotonic() < until
        time.sleep(0.001)
    box.append(1)
    ring_all([bell])
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1
    assert bell.words[1] == 0
    bell.close()
    waiter.close()


def test_a_ring_between_the_look_and_the_sleep_is_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half of the handshake: who says that it sleeps looks once more."""
    monkeypatch.setenv(NO_NATIVE_VARIABLE, "1")  # machine code takes no such detour; the word is compared below
    waiter = Waiter.create()
    monkeypatch.setattr(doorbell, "fence", lambda: waiter._bell.words.__setitem__(0, 77))
    begin = time.monotonic()
    waiter._bell.wait(waiter._bell.value(), 20)
    assert time.monotonic() - begin < 5
    monkeypatch.undo()
    waiter.close()


@pytest.mark.usefixtures("way")
def test_one_who_wakes_does_not_hide_one_who_sleeps() -> None:
    waiter = Waiter.create()
    box: list[int] = []
    sleeper = threading.Thread(target=waiter.wait, args=(lambda: box or None, soon()))
    sleeper.start()
    for _ in range(20):
        waiter._bell.wait(waiter._bell.value(), 0.002)
    until = soon()
    while not waiter._bell.sleepers:
        assert time.monotonic() < until
    assert waiter._bell.words[1] == 1
    box.append(1)
    waiter.ring()
    sleeper.join(10)
    assert not sleeper.is_alive()
    waiter.close()


def test_how_a_sleep_ends(way: str) -> None:
    """At once where the word is another, at its time, by a signal whose handler has run then, and by the end of the
    bell: then whoever sleeps is out of it before the memory goes."""
    waiter = Waiter.create()
    bell = waiter._bell
    assert (bell._sleep is not None) is (way == "machine code")
    begin = time.monotonic()
    assert not bell.wait(bell.value() ^ 1, 20)
    assert bell.wait(bell.value(), 0)
    assert time.monotonic() - begin < 5
    assert bell.wait(bell.value(), 0.05)
    assert bell.wait(bell.value(), 1.5e-9)
    noted: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _frame: noted.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert not bell.wait(bell.value(), 20)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert noted
    assert (bell.sleepers, bell.words[1]) == (0, 0)
    ended: list[BaseException] = []

    def sleep() -> None:
        try:
            while True:
                waiter.wait(lambda: None, None)
        except ChannelClosedError as error:
            ended.append(error)

    threads = [threading.Thread(target=sleep) for _ in range(3)]
    for thread in threads:
        thread.start()
    until = soon()
    while bell.sleepers < len(threads):
        assert time.monotonic() < until
    waiter.close()
    assert bell.sleepers == 0 or way == "Python"
    for thread in threads:
        thread.join(10)
    assert len(ended) == len(threads)
    with pytest.raises(ChannelClosedError):
        bell.wait(0, 1)


def test_closing_in_a_forked_child_does_not_wait_for_the_parents_threads() -> None:
    waiter = Waiter.create()

    def sleep() -> None:
        with contextlib.suppress(ChannelClosedError):
            waiter.wait(lambda: None, None)

    thread = threading.Thread(target=sleep)
    thread.start()
    until = soon()
    while not waiter._bell.sleepers:
        assert time.monotonic() < until

    def child() -> None:
        begin = time.monotonic()
        waiter._bell.close()
        assert time.monotonic() - begin < 2

    with children() as start:
        assert start(child).join() == 0
    waiter.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "ppc64le"])
def test_fences_of_other_machines_run_here_too(machine: str) -> None:
    full, between = fences_of(machine)
    full()
    between()
    assert (between is full) == (machine != "x86_64")
    assert (full is fences_of("aarch64")[0]) == (machine != "ppc64le")  # where locks prove nothing: a system call


@pytest.mark.alone
def test_an_idle_waiter_costs_nothing() -> None:
    waiter = Waiter.create()

    def child() -> None:
        Waiter.attach(waiter.fd).wait(lambda: None, None)

    with children() as start:
        process = start(child)
        process.asleep(soon())
        before = process.cpu_seconds()
        time.sleep(1.0)
        assert process.cpu_seconds() - before == 0
    waiter.close()


@pytest.mark.soak
def test_twenty_idle_seconds_cost_ten_milliseconds_at_most() -> None:
    """After a burst of messages 10 ms apart, which is what makes a waiter watch: four safety looks, nothing else."""
    waiter = Waiter.create()
    read_end, write_end = os.pipe()

    def child() -> None:
        me = Waiter.attach(waiter.fd)
        me.predictor = SpinPredictor()
        number = 0
        while number < 50:
            number = me.wait(lambda last=number: words[8] if words[8] != last else None, soon()) or 0
            assert number
        before = time.process_time()
        assert me.wait(lambda: None, time.monotonic() + 20) is None
        os.write(write_end, str(time.process_time() - before).encode())
        assert me.lost_wakes == 0

    bell = waiter.ringer(1)
    words = bell.words  # of which the ninth is nobody's
    with children() as start:
        process = start(child)
        process.asleep(soon())
        for number in range(1, 51):
            words[8] = number
            bell.ring()
            time.sleep(0.01)
        assert process.join(40) == 0
    cost = float(os.read(read_end, 100))
    print(f"20 s idle: {cost * 1000:.2f} ms of CPU")
    assert cost < 0.010
    os.close(read_end)
    os.close(write_end)
    bell.close()
    waiter.close()


def test_closing_wakes_those_who_wait() -> None:
    waiter = Waiter.create()
    caught: list[BaseException] = []
    inside = threading.Event()

    def wait() -> None:
        try:
            waiter.wait(inside.set)
        except ChannelClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert inside.wait(10)
    waiter.close()
    waiter.close()
    thread.join(10)
    assert len(caught) == 1
    waiter.ring()  # a late ring of another thread does nothing
    with pytest.raises(ChannelClosedError):
        waiter.wait(lambda: None)


def test_a_dead_peer_leaves_the_bell_usable() -> None:
    waiter = Waiter.create()
    box: list[int] = []

    def child(ready: Callable[[], None]) -> None:
        bell = Doorbell.attach(waiter.fd, 1)
        ready()
        while True:
            bell.ring()

    read_end, write_end = os.pipe()
    with children() as start:
        process = start(child, lambda: os.write(write_end, b"x"))
        assert os.read(read_end, 1) == b"x"
        process.kill()
    os.close(read_end)
    os.close(write_end)
    thread = threading.Timer(0.02, lambda: (box.append(1), waiter.ring()))
    thread.start()
    assert waiter.wait(lambda: box[0] if box else None, soon()) == 1
    thread.join()
    waiter.close()


def test_fence_is_reentrant_and_keeps_its_pool() -> None:
    size = len(_pool)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            fence()

    previous = signal.signal(signal.SIGALRM, lambda *_: fence())
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    threads = [threading.Thread(target=work) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(20_000):
            fence()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert size <= len(_pool) <= size + 8
    assert all(lock.locked() for lock in _pool)
