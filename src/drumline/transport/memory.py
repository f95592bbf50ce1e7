"""Shared memory without a name: a memfd that travels by SCM_RIGHTS or over a fork.

Nothing appears in /dev/shm, so nothing can be left there by a kill, a 64 MB limit of a container does not matter, and
there is no resource tracker. The kernel frees the memory with the last descriptor and mapping. The size is sealed, so
no peer can shrink the file under a mapping (which would be a SIGBUS in whoever touches it next).

Where there is no memfd (macOS) it is a file in the temporary folder, unlinked before it is used: nothing is left there
either, but it has no seals, and the disk may see its pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

from drumline.errors import ChannelClosedError

_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; not in Python's os module before 3.13
_F_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW


def memfd(name: str, size: int = 0) -> int:
    """A new memfd (close-on-exec, never executable) of ``size`` bytes; its descriptor, which the caller closes.

    With ``vm.memfd_noexec=2`` the kernel refuses a memfd without MFD_NOEXEC_SEAL, before 6.3 it does not know that
    flag: so ask with it first (6.3 and newer also log a warning about memfds that do not say), then without.
    With a size the size is sealed; with 0 the file may grow, as a rendezvous file must.
    """
    if not hasattr(os, "memfd_create"):
        return _unlinked_file(name, size)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)
    if size:
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
    return fd


def _unlinked_file(name: str, size: int) -> int:
    fd, path = tempfile.mkstemp(prefix=name)
    try:
        Path(path).unlink()
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_readonly(fd: int, offset: int, size: int) -> mmap.mmap:
    """Map a part of a file so that nobody in this process can write there; ``offset`` and ``size`` are whole pages.

    The object says that it is writable, which ctypes asks for before it makes anything that lies inside; the kernel
    says no (SIGSEGV). A buffer of Python that is made of it must be made read-only.
    """
    mapping = mmap.mmap(fd, size, offset=offset)
    anchor = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(anchor)
    del anchor
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(mmap.PROT_READ)):
        code = ctypes.get_errno()
        raise OSError(code, f"mprotect: {os.strerror(code)}")
    return mapping


class SharedMemory:
    """One mapped memfd.

    ``fd`` is the descriptor to hand to peers (only on the side that made it; -1 on the attached side), ``buf`` a
    writable memoryview of bytes, ``size`` its length in bytes. New memory is zero.
    """

    def __init__(self, fd: int, size: int, *, own_fd: bool) -> None:
        self.fd = fd if own_fd else -1
        self.size = size
        self._map: mmap.mmap | None = mmap.mmap(fd, size)
        self.buf = memoryview(self._map)

    @classmethod
    def create(cls, size: int, name: str = "drumline") -> SharedMemory:
        """New memory of ``size`` bytes. ``name`` shows up in /proc/PID/maps only."""
        fd = memfd(name, size)
        try:
            return cls(fd, size, own_fd=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int | None = None) -> SharedMemory:
        """Map what a peer made. The descriptor stays the caller's, who may close it right after.

        ``size`` defaults to the size of the file. ChannelClosedError if the file is smaller than that.
        """
        actual = os.fstat(fd).st_size
        if size is None:
            size = actual
        if actual < size or size <= 0:
            raise ChannelClosedError(f"shared memory has {actual} bytes, {size} expected")
        return cls(fd, size, own_fd=False)

    def mapping(self) -> mmap.mmap:
        """The mapping itself; ChannelClosedError once closed."""
        if self._map is None:
            raise ChannelClosedError("this shared memory is closed")
        return self._map

    def close(self) -> None:
        """Unmap and close the descriptor. Idempotent.

        Memory that somebody still holds a view of stays mapped until that view is collected.
        """
        if self._map is None:
            return
        mapping, self._map = self._map, None
        try:
            self.buf.release()
            mapping.close()
        except BufferError:
            pass  # a view is left: the mapping goes with it
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
