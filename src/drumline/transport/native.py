"""The way of a small message in machine code: into the ring and onto the bells, the sleep for it, out of the ring.

What :mod:`ring` and :mod:`doorbell` do for a message of one slot without buffers, in one call each, with the same
bytes in memory: a process with this code and one without it understand each other, and both pass the same tests. All
else (several slots, buffers, no room, a record that is not right at first look) stays with them. It is optional.

**Why there is native code.** Measured: Python's part of a small message was most of its time, cold nearly all of it.
10 ms apart, on 32 cores with 8 readers, writing took 43 us (5 hot) of the 60 that a round trip may take; what is cold
are the interpreter's own code and objects, not the message. docs/performance.md has the figures.

**How.** The text below is LLVM's intermediate language, compiled in the process by llvmlite, which comes with numba,
which drumline needs anyway: no compiler at installation, no files. It takes some 30 ms; the fork server does it before
it forks. The loads and stores of shared words are atomic ones with the order that :mod:`fence` names, so that nothing
rests on what Python's locks do.

They are **builtin functions** of Python, made at run time (``PyCFunction_NewEx``, of the stable ABI): a call takes 50
ns, where ctypes takes 500 and ten times that when it is cold. Each end of a ring has its own, bound to words that say
where the ring is. The interpreter's lock is held meanwhile: a call takes a microsecond, plus one for each reader that
must be woken, and nobody can close what it uses. Who closes a ring or a bell puts 0 where its address was; the calls
look.

**Sleeping** is the one thing that gives the lock away. Python's part of a sleep (locks, fences, ctypes) and of the look
before and after it was most of what a reader did: 256 bytes back to back to 8 readers on 2 cores took the tree 270 us
of user time a message, 117 in here. Nobody may unmap the word meanwhile, since the sleeper clears "asleep" beside it
when it has the lock again; so sleepers are counted, and who closes the bell rings it and waits until there are none
(:meth:`Doorbell.close <drumline.transport.doorbell.Doorbell.close>`).

Without llvmlite, without a futex, where memory must not be executable, or with ``DRUMLINE_NO_NATIVE=1``, everything
goes the other way.

Rejected: ctypes (see above); numba's ``cfunc`` (half a second of import, and no atomic accesses); a C extension (a
compiler, wheels for each machine); watching in here (it would keep the lock, or take and give it at each look).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from drumline.transport.futex import futex_or_none
from drumline.transport.records import HEAD_BYTES, SUMMED, WANTED, WRITTEN, RingLayout

NO_NATIVE_VARIABLE = "DRUMLINE_NO_NATIVE"
"""Environment variable: not empty and not 0 means that no process of this run uses this module."""
SMALL = 8192
"""Bytes of the largest message that goes this way."""

# Words (uint64) of what a call is about.
CONTROL, DATA, SLOT_BYTES, SLOTS, ONE_SLOT, PLACE, COUNT, FREE, FUTEX, BELLS, FIRST_BELL = range(11)
"""Of a writer: addresses of the control words and of the slots, geometry, the slot that is next, the count of slots
written, how many are free, the number of the futex call, how many bells there are, and their addresses."""
OWN_WORD, KIND, DUE, WANTS = FREE, FUTEX, BELLS, FIRST_BELL
"""Of a reader in their place: which of the control words is its own; of the message that was read last, its kind, when
the next one is due, and whether the writer must be woken."""
READER_BELL = WANTS + 1
"""Address of the words of the bell on which it sleeps."""
READER_WORDS = READER_BELL + 1
BELL_ADDRESS, BELL_COUNTER, BELL_SLEEPERS, BELL_FUTEX, BELL_WORDS = range(5)
"""Of a bell: where its words are (0: closed), the value that it gets next, how many threads of this process are inside
``sleep``, and the number of the futex call."""
BELL_STEP = 512
"""Bells are rung with every second value of a ringer; what rings them in Python takes the others."""

OTHERWISE = -2
"""There is a message that must be taken the other way."""
WRONG = -3
"""Its sequence number or its checksum is not right."""
LATE, CLOSED, INTERRUPTED = -4, -5, -6
"""How a sleep ended, if not by a ring: the time was over, the bell is closed, a signal came."""
ERRNO = -1000
"""From here on down: this, less the error of the system call."""

_log = logging.getLogger("drumline.transport")


class _MethodDef(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_METH_FASTCALL = 0x0080


class Native:
    """The compiled functions. Addresses and sizes are not checked: :mod:`ring` hands over what it owns."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # it owns the code
        self._send = self._define(b"send")
        self._take = self._define(b"take")
        self._sleep = self._define(b"sleep")
        self._receive = self._define(b"receive")
        # For ever: a builtin function looks at its definition when it is freed, perhaps after all modules are gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _define(self, name: bytes) -> _MethodDef:
        return _MethodDef(name, self._engine.get_function_address(name.decode() + "_call"), _METH_FASTCALL, None)

    def sender(self, words: int) -> Send:
        """``send(data, kind, due)`` for the writer whose words lie there (and must outlive it).

        True: sent, bells rung; False: it must go the other way, for lack of room or since it is not small.
        """
        send: Send = _bound(self._send, words)
        return send

    def taker(self, words: int) -> Take:
        """``take()`` for the reader whose words lie there.

        The bytes of the next message, whose slot is free then, and of which KIND, DUE and WANTS tell more; None: there
        is none; OTHERWISE; WRONG.
        """
        take: Take = _bound(self._take, words)
        return take

    def sleeper(self, words: int) -> Sleep:
        """``sleep(seen, nanoseconds)`` on the bell whose words lie there, as long as its word is ``seen``.

        0: it is not, or somebody rang, or for no reason; or how else it ended. The lock is given away.
        """
        sleep: Sleep = _bound(self._sleep, words)
        return sleep

    def receiver(self, words: int) -> Receive:
        """``receive(seen, nanoseconds)``: as ``take``, and if there is none, sleep on READER_BELL and take.

        What a sleep that was not ended by a ring returns, in place of the message, which is not looked for then.
        """
        receive: Receive = _bound(self._receive, words)
        return receive


Send = Callable[[bytes, int, int], bool]
Take = Callable[[], "bytes | int | None"]
Sleep = Callable[[int, int], int]
Receive = Callable[[int, int], "bytes | int | None"]


def _bound(method: _MethodDef, words: int) -> Any:
    api = ctypes.pythonapi
    api.PyCapsule_New.restype = api.PyCFunction_NewEx.restype = ctypes.py_object
    capsule = api.PyCapsule_New(ctypes.c_void_p(words), None, None)
    return api.PyCFunction_NewEx(ctypes.byref(method), ctypes.py_object(capsule), None)


def address_of(buf: memoryview) -> int:
    """Where a writable buffer lies. Good as long as somebody holds a view of it."""
    anchor = ctypes.c_char.from_buffer(buf)
    return ctypes.addressof(anchor)


def words(count: int) -> tuple[int, memoryview]:
    """Memory for so many uint64 that calls and Python share: its address, and the words, which keep it."""
    made = (ctypes.c_uint64 * count)()
    return ctypes.addressof(made), memoryview(made).cast("B").cast("Q")


def describe(state: memoryview, buf: memoryview, layout: RingLayout) -> None:
    """Say in these words where a ring is, and its geometry."""
    address = address_of(buf)
    state[CONTROL] = address
    state[DATA] = address + layout.control_bytes
    state[SLOT_BYTES], state[SLOTS], state[ONE_SLOT] = layout.slot_bytes, layout.slots, layout.slot_bytes - HEAD_BYTES


def native() -> Native | None:
    """The functions, compiled once in a process (and once for all that are forked from it); None: not here."""
    if os.environ.get(NO_NATIVE_VARIABLE, "0") not in ("", "0") or futex_or_none() is None or sys.maxsize < 2**32:
        return None  # (the words hold addresses of 64 bits)
    return _compiled()


@functools.cache
def _compiled() -> Native | None:
    try:
        return Native(_compile())
    except Exception as exc:  # noqa: BLE001  there is another way for all of it
        _log.debug("no machine code for messages: %s: %s", type(exc).__name__, exc)
        return None


def _compile() -> Any:
    import llvmlite.binding as llvm  # here: processes that have no ring do not need it

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_text())
    module.verify()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _text() -> str:
    lanes = ", ".join(f"i32 {lane}" for lane in range(16))
    sixteen = ", ".join(["i32 16"] * 16)
    values = {
        "LANES": lanes,
        "SIXTEEN": sixteen,
        "WRITTEN": 4 * WRITTEN,
        "WANTED": 4 * WANTED,
        "HEAD": HEAD_BYTES,
        "SUMMED": SUMMED,
        "REST": HEAD_BYTES - SUMMED,
        "SMALL": SMALL,
        "STEP": BELL_STEP,
        "OTHERWISE": OTHERWISE,
        "WRONG": WRONG,
        "FIRST_BELL": FIRST_BELL,
        "LATE": LATE,
        "CLOSED": CLOSED,
        "INTERRUPTED": INTERRUPTED,
        "ERRNO": ERRNO,
        "EAGAIN": errno.EAGAIN,
        "EINTR": errno.EINTR,
        "ETIMEDOUT": errno.ETIMEDOUT,
        "EFAULT": errno.EFAULT,
    }
    names = {"CONTROL": CONTROL, "DATA": DATA, "SLOT_BYTES": SLOT_BYTES, "SLOTS": SLOTS, "ONE_SLOT": ONE_SLOT}
    names |= {"PLACE": PLACE, "COUNT": COUNT, "FREE": FREE, "FUTEX": FUTEX, "BELLS": BELLS}
    names |= {"OWN_WORD": OWN_WORD, "KIND": KIND, "DUE": DUE, "WANTS": WANTS, "READER_BELL": READER_BELL}
    names |= {"BELL_SLEEPERS": BELL_SLEEPERS, "BELL_FUTEX": BELL_FUTEX}
    values |= {f"AT_{name}": 8 * place for name, place in names.items()}
    text = _SUM + _SEND + _SEND_CALL + _TAKE + _SLEEP
    for name in sorted(values, key=len, reverse=True):
        text = text.replace(f"${name}", str(values[name]))
    return text


# Adler-32 (RFC 1950) of at most SMALL + 24 bytes: a = a0 + sum d(i), b = b0 + n a0 + sum (n - i) d(i), modulo 65521 at
# the end. In 32 bits the second sum of a lane stays below 8,216 x 255 x 514, and their sum is taken in 64.
_SUM = """
declare i64 @syscall(i64, ...)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.vector.reduce.add.v16i64(<16 x i64>)

define internal i32 @adler(ptr %data, i64 %n, i32 %start) {
entry:
  %n32 = trunc i64 %n to i32
  %blocks = and i64 %n, -16
  %one = insertelement <16 x i32> poison, i32 %n32, i32 0
  %all = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %first = sub <16 x i32> %all, <$LANES>
  %any = icmp ne i64 %blocks, 0
  br i1 %any, label %loop, label %tail
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %weights = phi <16 x i32> [ %first, %entry ], [ %weights.next, %loop ]
  %s1 = phi <16 x i32> [ zeroinitializer, %entry ], [ %s1.next, %loop ]
  %s2 = phi <16 x i32> [ zeroinitializer, %entry ], [ %s2.next, %loop ]
  %at = getelementptr i8, ptr %data, i64 %i
  %bytes = load <16 x i8>, ptr %at, align 1
  %wide = zext <16 x i8> %bytes to <16 x i32>
  %s1.next = add <16 x i32> %s1, %wide
  %product = mul <16 x i32> %wide, %weights
  %s2.next = add <16 x i32> %s2, %product
  %weights.next = sub <16 x i32> %weights, <$SIXTEEN>
  %i.next = add i64 %i, 16
  %more = icmp ult i64 %i.next, %blocks
  br i1 %more, label %loop, label %sums
sums:
  %s1.wide = zext <16 x i32> %s1.next to <16 x i64>
  %s2.wide = zext <16 x i32> %s2.next to <16 x i64>
  %a.sum = call i64 @llvm.vector.reduce.add.v16i64(<16 x i64> %s1.wide)
  %b.sum = call i64 @llvm.vector.reduce.add.v16i64(<16 x i64> %s2.wide)
  br label %tail
tail:
  %j = phi i64 [ %blocks, %sums ], [ 0, %entry ], [ %j.next, %byte ]
  %a = phi i64 [ %a.sum, %sums ], [ 0, %entry ], [ %a.next, %byte ]
  %b = phi i64 [ %b.sum, %sums ], [ 0, %entry ], [ %b.next, %byte ]
  %left = icmp ult i64 %j, %n
  br i1 %left, label %byte, label %done
byte:
  %j.at = getelementptr i8, ptr %data, i64 %j
  %d = load i8, ptr %j.at
  %d.wide = zext i8 %d to i64
  %a.next = add i64 %a, %d.wide
  %weight = sub i64 %n, %j
  %weighted = mul i64 %weight, %d.wide
  %b.next = add i64 %b, %weighted
  %j.next = add i64 %j, 1
  br label %tail
done:
  %start.wide = zext i32 %start to i64
  %a0 = and i64 %start.wide, 65535
  %b0 = lshr i64 %start.wide, 16
  %a.all = add i64 %a, %a0
  %n.a0 = mul i64 %n, %a0
  %b.some = add i64 %b, %b0
  %b.all = add i64 %b.some, %n.a0
  %a.rest = urem i64 %a.all, 65521
  %b.rest = urem i64 %b.all, 65521
  %b.high = shl i64 %b.rest, 16
  %both = or i64 %b.high, %a.rest
  %sum = trunc i64 %both to i32
  ret i32 %sum
}
"""

# Data, then the count (release), then each bell (release), a full fence, and a look at who is asleep: see doorbell.py.
_SEND = """
define internal i32 @send(ptr %w, ptr %payload, i32 %length, i32 %kind, i32 %due) {
entry:
  %control.w = load i64, ptr %w
  %open = icmp ne i64 %control.w, 0
  %one_slot.at = getelementptr i8, ptr %w, i64 $AT_ONE_SLOT
  %one_slot = load i64, ptr %one_slot.at
  %length.wide = zext i32 %length to i64
  %fits = icmp ule i64 %length.wide, %one_slot
  %small = icmp ule i64 %length.wide, $SMALL
  %free.at = getelementptr i8, ptr %w, i64 $AT_FREE
  %free = load i64, ptr %free.at
  %room = icmp ne i64 %free, 0
  %ok1 = and i1 %open, %fits
  %ok2 = and i1 %small, %room
  %ok = and i1 %ok1, %ok2
  br i1 %ok, label %write, label %otherwise
otherwise:
  ret i32 0
write:
  %control = inttoptr i64 %control.w to ptr
  %data.at = getelementptr i8, ptr %w, i64 $AT_DATA
  %data = load ptr, ptr %data.at
  %slot_bytes.at = getelementptr i8, ptr %w, i64 $AT_SLOT_BYTES
  %slot_bytes = load i64, ptr %slot_bytes.at
  %slots.at = getelementptr i8, ptr %w, i64 $AT_SLOTS
  %slots = load i64, ptr %slots.at
  %place.at = getelementptr i8, ptr %w, i64 $AT_PLACE
  %place = load i64, ptr %place.at
  %count.at = getelementptr i8, ptr %w, i64 $AT_COUNT
  %count = load i64, ptr %count.at
  %count32 = trunc i64 %count to i32
  %begin = mul i64 %place, %slot_bytes
  %slot = getelementptr i8, ptr %data, i64 %begin
  store i32 %count32, ptr %slot
  %sum.at = getelementptr i8, ptr %slot, i64 4
  %kind.at = getelementptr i8, ptr %slot, i64 8
  store i32 %kind, ptr %kind.at
  %due.at = getelementptr i8, ptr %slot, i64 12
  store i32 %due, ptr %due.at
  %length.at = getelementptr i8, ptr %slot, i64 16
  store i32 %length, ptr %length.at
  %buffers.at = getelementptr i8, ptr %slot, i64 20
  store i32 0, ptr %buffers.at
  %rest.at = getelementptr i8, ptr %slot, i64 24
  store i64 0, ptr %rest.at
  %bytes.at = getelementptr i8, ptr %slot, i64 $HEAD
  call void @llvm.memcpy.p0.p0.i64(ptr %bytes.at, ptr %payload, i64 %length.wide, i1 false)
  %summed = add i64 %length.wide, $REST
  %sum = call i32 @adler(ptr %kind.at, i64 %summed, i32 %count32)
  store i32 %sum, ptr %sum.at
  %free.next = sub i64 %free, 1
  store i64 %free.next, ptr %free.at
  %place.next = add i64 %place, 1
  %inside = icmp ult i64 %place.next, %slots
  %place.new = select i1 %inside, i64 %place.next, i64 0
  store i64 %place.new, ptr %place.at
  %count.next = add i32 %count32, 1
  %count.new = zext i32 %count.next to i64
  store i64 %count.new, ptr %count.at
  %written.at = getelementptr i8, ptr %control, i64 $WRITTEN
  store atomic i32 %count.next, ptr %written.at release, align 4
  %bells.at = getelementptr i8, ptr %w, i64 $AT_BELLS
  %bells = load i64, ptr %bells.at
  br label %rings
rings:
  %i = phi i64 [ 0, %write ], [ %i.next, %rung ]
  %rings.more = icmp ult i64 %i, %bells
  br i1 %rings.more, label %ring, label %rang
ring:
  %i.place = add i64 %i, $FIRST_BELL
  %i.at = getelementptr i64, ptr %w, i64 %i.place
  %i.bell = load ptr, ptr %i.at
  %i.words = load i64, ptr %i.bell
  %i.open = icmp ne i64 %i.words, 0
  br i1 %i.open, label %change, label %rung
change:
  %i.word = inttoptr i64 %i.words to ptr
  %counter.at = getelementptr i64, ptr %i.bell, i64 1
  %value = atomicrmw add ptr %counter.at, i64 $STEP monotonic
  %value32 = trunc i64 %value to i32
  store atomic i32 %value32, ptr %i.word release, align 4
  br label %rung
rung:
  %i.next = add i64 %i, 1
  br label %rings
rang:
  fence seq_cst
  %futex.at = getelementptr i8, ptr %w, i64 $AT_FUTEX
  %futex = load i64, ptr %futex.at
  br label %wakes
wakes:
  %j = phi i64 [ 0, %rang ], [ %j.next, %looked ]
  %wakes.more = icmp ult i64 %j, %bells
  br i1 %wakes.more, label %look, label %sent
look:
  %j.place = add i64 %j, $FIRST_BELL
  %j.at = getelementptr i64, ptr %w, i64 %j.place
  %j.bell = load ptr, ptr %j.at
  %j.words = load i64, ptr %j.bell
  %j.open = icmp ne i64 %j.words, 0
  br i1 %j.open, label %ask, label %looked
ask:
  %j.word = inttoptr i64 %j.words to ptr
  %asleep.at = getelementptr i8, ptr %j.word, i64 4
  %asleep = load atomic i32, ptr %asleep.at monotonic, align 4
  %sleeps = icmp ne i32 %asleep, 0
  br i1 %sleeps, label %wake, label %looked
wake:
  %woken = call i64 (i64, ...) @syscall(i64 %futex, ptr %j.word, i32 1, i32 2147483647)
  br label %looked
looked:
  %j.next = add i64 %j, 1
  br label %wakes
sent:
  ret i32 1
}
"""

_SEND_CALL = """
declare ptr @PyCapsule_GetPointer(ptr, ptr)
declare ptr @PyBytes_AsString(ptr)
declare i64 @PyBytes_Size(ptr)
declare i64 @PyLong_AsUnsignedLongMask(ptr)
declare ptr @PyBool_FromLong(i64)

define ptr @send_call(ptr %self, ptr %args, i64 %count) {
entry:
  %w = call ptr @PyCapsule_GetPointer(ptr %self, ptr null)
  %three = icmp eq i64 %count, 3
  br i1 %three, label %read, label %other
read:
  %data = load ptr, ptr %args
  %kind.at = getelementptr ptr, ptr %args, i64 1
  %kind.object = load ptr, ptr %kind.at
  %due.at = getelementptr ptr, ptr %args, i64 2
  %due.object = load ptr, ptr %due.at
  %bytes = call ptr @PyBytes_AsString(ptr %data)
  %found = icmp ne ptr %bytes, null
  br i1 %found, label %numbers, label %error
error:
  ret ptr null
numbers:
  %length = call i64 @PyBytes_Size(ptr %data)
  %small = icmp ule i64 %length, $SMALL
  br i1 %small, label %write, label %other
other:
  %no = call ptr @PyBool_FromLong(i64 0)
  ret ptr %no
write:
  %kind = call i64 @PyLong_AsUnsignedLongMask(ptr %kind.object)
  %due = call i64 @PyLong_AsUnsignedLongMask(ptr %due.object)
  %length32 = trunc i64 %length to i32
  %kind32 = trunc i64 %kind to i32
  %due32 = trunc i64 %due to i32
  %sent = call i32 @send(ptr %w, ptr %bytes, i32 %length32, i32 %kind32, i32 %due32)
  %wide = zext i32 %sent to i64
  %told = call ptr @PyBool_FromLong(i64 %wide)
  ret ptr %told
}
"""

# The count (acquire), the record, copied before it is looked at; its own count (release), a full fence, and a look at
# whether the writer waits for room: see ring.py.
_TAKE = """
@_Py_NoneStruct = external global i8
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyLong_FromLong(i64)
declare ptr @PyBytes_FromStringAndSize(ptr, i64)

define ptr @take_call(ptr %self, ptr %args, i64 %arguments) {
entry:
  %r = call ptr @PyCapsule_GetPointer(ptr %self, ptr null)
  %object = call ptr @take(ptr %r)
  ret ptr %object
}

define internal ptr @take(ptr %r) {
entry:
  %head = alloca [$HEAD x i8], align 8
  %control.r = load i64, ptr %r
  %open = icmp ne i64 %control.r, 0
  br i1 %open, label %look, label %otherwise
otherwise:
  %say.otherwise = call ptr @PyLong_FromLong(i64 $OTHERWISE)
  ret ptr %say.otherwise
nothing:
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
no.memory:
  ret ptr null
wrong.bytes:
  call void @Py_DecRef(ptr %object)
  br label %wrong
wrong:
  %say.wrong = call ptr @PyLong_FromLong(i64 $WRONG)
  ret ptr %say.wrong
look:
  %control = inttoptr i64 %control.r to ptr
  %count.at = getelementptr i8, ptr %r, i64 $AT_COUNT
  %count = load i64, ptr %count.at
  %count32 = trunc i64 %count to i32
  %written.at = getelementptr i8, ptr %control, i64 $WRITTEN
  %written = load atomic i32, ptr %written.at acquire, align 4
  %empty = icmp eq i32 %written, %count32
  br i1 %empty, label %nothing, label %head.read
head.read:
  %data.at = getelementptr i8, ptr %r, i64 $AT_DATA
  %data = load ptr, ptr %data.at
  %slot_bytes.at = getelementptr i8, ptr %r, i64 $AT_SLOT_BYTES
  %slot_bytes = load i64, ptr %slot_bytes.at
  %place.at = getelementptr i8, ptr %r, i64 $AT_PLACE
  %place = load i64, ptr %place.at
  %begin = mul i64 %place, %slot_bytes
  %slot = getelementptr i8, ptr %data, i64 %begin
  call void @llvm.memcpy.p0.p0.i64(ptr %head, ptr %slot, i64 $HEAD, i1 false)
  %sequence = load i32, ptr %head
  %sum.at = getelementptr i8, ptr %head, i64 4
  %sum = load i32, ptr %sum.at
  %kind.at = getelementptr i8, ptr %head, i64 8
  %kind = load i32, ptr %kind.at
  %due.at = getelementptr i8, ptr %head, i64 12
  %due = load i32, ptr %due.at
  %length.at = getelementptr i8, ptr %head, i64 16
  %length = load i32, ptr %length.at
  %buffers.at = getelementptr i8, ptr %head, i64 20
  %buffers = load i32, ptr %buffers.at
  %rest.at = getelementptr i8, ptr %head, i64 24
  %rest = load i64, ptr %rest.at
  %length.wide = zext i32 %length to i64
  %one_slot.at = getelementptr i8, ptr %r, i64 $AT_ONE_SLOT
  %one_slot = load i64, ptr %one_slot.at
  %next = icmp eq i32 %sequence, %count32
  br i1 %next, label %sort, label %wrong
sort:
  %fits = icmp ule i64 %length.wide, %one_slot
  %small = icmp ule i64 %length.wide, $SMALL
  %plain = icmp eq i32 %buffers, 0
  %whole = icmp eq i64 %rest, 0
  %ok1 = and i1 %small, %fits
  %ok2 = and i1 %whole, %plain
  %ok = and i1 %ok1, %ok2
  br i1 %ok, label %copy, label %otherwise
copy:
  %bytes.at = getelementptr i8, ptr %slot, i64 $HEAD
  %object = call ptr @PyBytes_FromStringAndSize(ptr %bytes.at, i64 %length.wide)
  %made = icmp ne ptr %object, null
  br i1 %made, label %check, label %no.memory
check:
  %bytes = call ptr @PyBytes_AsString(ptr %object)
  %head.sum = call i32 @adler(ptr %kind.at, i64 $REST, i32 %count32)
  %found = call i32 @adler(ptr %bytes, i64 %length.wide, i32 %head.sum)
  %right = icmp eq i32 %found, %sum
  br i1 %right, label %advance, label %wrong.bytes
advance:
  %kind.r = getelementptr i8, ptr %r, i64 $AT_KIND
  %kind.wide = zext i32 %kind to i64
  store i64 %kind.wide, ptr %kind.r
  %due.r = getelementptr i8, ptr %r, i64 $AT_DUE
  %due.wide = zext i32 %due to i64
  store i64 %due.wide, ptr %due.r
  %slots.at = getelementptr i8, ptr %r, i64 $AT_SLOTS
  %slots = load i64, ptr %slots.at
  %place.next = add i64 %place, 1
  %inside = icmp ult i64 %place.next, %slots
  %place.new = select i1 %inside, i64 %place.next, i64 0
  store i64 %place.new, ptr %place.at
  %count.next = add i32 %count32, 1
  %count.new = zext i32 %count.next to i64
  store i64 %count.new, ptr %count.at
  %own.at = getelementptr i8, ptr %r, i64 $AT_OWN_WORD
  %own.index = load i64, ptr %own.at
  %own = getelementptr i32, ptr %control, i64 %own.index
  store atomic i32 %count.next, ptr %own release, align 4
  fence seq_cst
  %wanted.at = getelementptr i8, ptr %control, i64 $WANTED
  %wanted = load atomic i32, ptr %wanted.at monotonic, align 4
  %wanted.wide = zext i32 %wanted to i64
  %wants.at = getelementptr i8, ptr %r, i64 $AT_WANTS
  store i64 %wanted.wide, ptr %wants.at
  ret ptr %object
}
"""

# See doorbell.py: "asleep", a full fence, a look at the word, the system call (FUTEX_WAIT is operation 0). The count of
# sleepers changes under the interpreter's lock only.
_SLEEP = """
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @__errno_location()

define internal i64 @sleep(ptr %b, i32 %seen, i64 %nanoseconds) {
entry:
  %time = alloca [2 x i64], align 8
  %words = load i64, ptr %b
  %open = icmp ne i64 %words, 0
  br i1 %open, label %lie.down, label %closed
closed:
  ret i64 $CLOSED
lie.down:
  %word = inttoptr i64 %words to ptr
  %asleep = getelementptr i8, ptr %word, i64 4
  %sleepers.at = getelementptr i8, ptr %b, i64 $AT_BELL_SLEEPERS
  %sleepers = load i64, ptr %sleepers.at
  %one.more = add i64 %sleepers, 1
  store i64 %one.more, ptr %sleepers.at
  store atomic i32 1, ptr %asleep monotonic, align 4
  fence seq_cst
  %now = load atomic i32, ptr %word acquire, align 4
  %same = icmp eq i32 %now, %seen
  br i1 %same, label %wait, label %rise
wait:
  %futex.at = getelementptr i8, ptr %b, i64 $AT_BELL_FUTEX
  %futex = load i64, ptr %futex.at
  %seconds = udiv i64 %nanoseconds, 1000000000
  %rest = urem i64 %nanoseconds, 1000000000
  store i64 %seconds, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  store i64 %rest, ptr %rest.at
  %thread = call ptr @PyEval_SaveThread()
  %result = call i64 (i64, ...) @syscall(i64 %futex, ptr %word, i32 0, i32 %seen, ptr %time, ptr null, i32 0)
  %error.at = call ptr @__errno_location()
  %error = load i32, ptr %error.at
  call void @PyEval_RestoreThread(ptr %thread)
  %failed = icmp slt i64 %result, 0
  br i1 %failed, label %sort, label %rise
sort:
  switch i32 %error, label %other [ i32 $EAGAIN, label %rise
                                    i32 $EINTR, label %interrupted
                                    i32 $ETIMEDOUT, label %late
                                    i32 $EFAULT, label %unmapped ]
interrupted:
  br label %rise
late:
  br label %rise
unmapped:
  br label %rise
other:
  %error.wide = sext i32 %error to i64
  %code = sub i64 $ERRNO, %error.wide
  br label %rise
rise:
  %how = phi i64 [ 0, %lie.down ], [ 0, %wait ], [ 0, %sort ], [ $INTERRUPTED, %interrupted ], [ $LATE, %late ],
                 [ $CLOSED, %unmapped ], [ %code, %other ]
  %were = load i64, ptr %sleepers.at
  %left = sub i64 %were, 1
  store i64 %left, ptr %sleepers.at
  %last = icmp eq i64 %left, 0
  br i1 %last, label %nobody, label %up
nobody:
  store atomic i32 0, ptr %asleep monotonic, align 4
  br label %up
up:
  ret i64 %how
}

define internal i64 @sleep_as_asked(ptr %b, ptr %args) {
entry:
  %seen.object = load ptr, ptr %args
  %seen.wide = call i64 @PyLong_AsUnsignedLongMask(ptr %seen.object)
  %seen = trunc i64 %seen.wide to i32
  %time.at = getelementptr ptr, ptr %args, i64 1
  %time.object = load ptr, ptr %time.at
  %time = call i64 @PyLong_AsUnsignedLongMask(ptr %time.object)
  %how = call i64 @sleep(ptr %b, i32 %seen, i64 %time)
  ret i64 %how
}

define ptr @sleep_call(ptr %self, ptr %args, i64 %arguments) {
entry:
  %b = call ptr @PyCapsule_GetPointer(ptr %self, ptr null)
  %how = call i64 @sleep_as_asked(ptr %b, ptr %args)
  %said = call ptr @PyLong_FromLong(i64 %how)
  ret ptr %said
}

define ptr @receive_call(ptr %self, ptr %args, i64 %arguments) {
entry:
  %r = call ptr @PyCapsule_GetPointer(ptr %self, ptr null)
  %object = call ptr @take(ptr %r)
  %none = icmp eq ptr %object, @_Py_NoneStruct
  br i1 %none, label %wait, label %found
found:
  ret ptr %object
wait:
  call void @Py_DecRef(ptr %object)
  %bell.at = getelementptr i8, ptr %r, i64 $AT_READER_BELL
  %b = load ptr, ptr %bell.at
  %how = call i64 @sleep_as_asked(ptr %b, ptr %args)
  %rung = icmp eq i64 %how, 0
  br i1 %rung, label %again, label %other
again:
  %next = call ptr @take(ptr %r)
  ret ptr %next
other:
  %said = call ptr @PyLong_FromLong(i64 %how)
  ret ptr %said
}
"""
