"""All-reduce of GPU tensors through torch's symmetric memory: a device communicator.

::

    tensor --copy--> this rank's buffer  <--read-- kernels of all ranks of the group --sum--> tensor

Every rank allocates one buffer of the same size and maps all others' (:meth:`SymmetricMemory.__init__`, a collective).
The kernels are torch's (``torch.ops.symm_mem``); they wait for each other's blocks through words in those buffers, at
their start and at their end, so when one has ended on a rank, nobody reads or writes that rank's buffer any more and
the next call may overwrite it. Everything is put on the current stream, and nothing on the CPU waits: it can be
captured in CUDA graphs, in any mixture with NCCL. One stream at a time may use a group, as with NCCL.

All ranks get the same bits: one-shot adds in the same order everywhere, two-shot sums each element on one rank.

What torch forces: a group is known to its operators by a name in a table of the process, so a bare ``ProcessGroup``
that only carries store, rank and size is put there. A rank that dies leaves the others' kernels waiting without end
(there is no watchdog as NCCL's): like any hang it is seen by the executor, which kills the workers.

NVLink multicast is off unless ``TORCH_SYMM_MEM_DISABLE_MULTICAST=0`` allows it, and nothing here uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from drumline.parallel.fast_choice import Choice, Method

MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
ALIGNMENT = 16
"""Bytes that a kernel moves at once: sizes that it divides, and addresses for reads without a copy."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types that the kernels sum."""

_ops: Any = torch.ops


class DeviceCommunicator(Protocol):
    """Sums tensors of a device over the members of one group, when it can and is worth it."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> bool:
        """Reduce in place. False: not this one; then nothing was done, here and on all other ranks alike."""

    def close(self) -> None:
        """Give up its memory. CUDA graphs that captured its operations must be gone before."""


def multicast_allowed() -> bool:
    """Whether the environment allows NVLink multicast; without a word it does not."""
    return os.environ.get(MULTICAST_OFF, "1").strip().lower() in ("0", "false", "no", "off", "n", "f")


def missing() -> str:
    """What this torch lacks for symmetric memory; empty: nothing."""
    if not dist.is_available():
        return "torch was built without distributed"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: F401
    except ImportError:
        return "this torch has no symmetric memory"
    lacking = [name for name in _OPERATORS if not hasattr(_ops.symm_mem, name)]
    return f"this torch has no symm_mem.{lacking[0]}" if lacking else ""


_OPERATORS = ("one_shot_all_reduce_out", "one_shot_all_reduce_copy_out", "two_shot_all_reduce_")


class SymmetricMemory:
    """One rank's buffer of its group, and the two sums over all of them. ``capacity``: its bytes.

    ``name`` is one that no other group of this process has or had, the same on all ranks.
    """

    def __init__(self, store: Any, place: int, size: int, device: torch.device, capacity: int, name: str) -> None:
        import torch.distributed._symmetric_memory as symmetric

        if not multicast_allowed():
            os.environ[MULTICAST_OFF] = "1"  # torch reads it when memory is mapped
        self.capacity = capacity
        self._name = name
        self._group = _registered(store, place, size, name)
        try:
            self._buffer: torch.Tensor | None = symmetric.empty(capacity, dtype=torch.uint8, device=device)
            self._handle = _map(self._buffer, name, place, size, store)
        except BaseException:
            self.close()
            raise
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def one_shot(self, tensor: torch.Tensor) -> None:
        """Sum in place. ``tensor`` is one that :func:`fits`, of ``capacity`` bytes at most."""
        flat, buffer = tensor.view(-1), self._view(tensor)
        if tensor.storage_offset() * tensor.element_size() % ALIGNMENT or tensor.data_ptr() % ALIGNMENT:
            buffer.copy_(flat)
            flat.copy_(_ops.symm_mem.one_shot_all_reduce_out(buffer, "sum", self._name, torch.empty_like(flat)))
        else:
            _ops.symm_mem.one_shot_all_reduce_copy_out(buffer, flat, "sum", self._name, flat)

    def two_shot(self, tensor: torch.Tensor) -> None:
        """Sum in place, as :meth:`one_shot`."""
        flat, buffer = tensor.view(-1), self._view(tensor)
        buffer.copy_(flat)
        _ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._name)
        flat.copy_(buffer)

    def close(self) -> None:
        """Let go of the buffer. Idempotent; the other ranks' mappings keep theirs alive until they close, too."""
        if self._group is None:
            return
        self._views, self._handle, self._buffer = {}, None, None
        _c10d("_unregister_process_group")(self._name)
        self._group = None

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.numel(), tensor.dtype)
        view = self._views.get(key)
        if view is None:
            if self._buffer is None:
                raise RuntimeError(f"{self._name} is closed")
            self._views[key] = view = self._buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return view


class FastAllReduce:
    """The communicator of one group: symmetric memory by the choice's table."""

    def __init__(self, memory: SymmetricMemory, choice: Choice) -> None:
        self.memory = memory
        self.choice = choice
        self._sums: dict[Method, Callable[[torch.Tensor], None]] = {
            Method.ONE_SHOT: memory.one_shot,
            Method.TWO_SHOT: memory.two_shot,
        }

    def all_reduce(self, tensor: torch.Tensor, op: str) -> bool:
        """Sum in place if the table says so; False: it is NCCL's."""
        if op != "sum" or not fits(tensor):
            return False
        sum_ = self._sums.get(self.choice.method(tensor.numel() * tensor.element_size()))
        if sum_ is None:
            return False
        sum_(tensor.detach() if tensor.requires_grad else tensor)
        return True

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.close()


def fits(tensor: torch.Tensor) -> bool:
    """Whether the kernels can sum a tensor like this one: by what is the same on all ranks."""
    size = tensor.numel() * tensor.element_size()
    return size > 0 and size % ALIGNMENT == 0 and tensor.dtype in DTYPES and tensor.is_contiguous()


def _c10d(name: str) -> Any:
    import torch._C._distributed_c10d as c10d

    return getattr(c10d, name)


def _registered(store: Any, place: int, size: int, name: str) -> Any:
    """A process group without a backend, known to torch's operators by its name."""
    group = _c10d("ProcessGroup")(store, place, size)
    group._set_group_name(name)
    _c10d("_register_process_group")(name, group)
    return group


def _map(buffer: torch.Tensor, name: str, place: int, size: int, store: Any) -> Any:
    """Map all members' buffers; a collective.

    Newer torch finds store, rank and size in the process group; older in a table of its own, which it tells. They are
    put there only then: torch that has both looks at that table, and at the store, in each operation.
    """
    memory = _c10d("_SymmetricMemory")
    try:
        return memory.rendezvous(buffer, name)
    except RuntimeError as error:
        if "group info" not in str(error):
            raise
    memory.set_group_info(name, place, size, store)
    return memory.rendezvous(buffer, name)
