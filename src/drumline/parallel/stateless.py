"""Groups that belong to no WORLD: processes that agree about small things, such as the engine cores of DP ranks.

A :class:`StatelessGroup` knows nothing of layouts, devices or models, and a process may be in any number of them beside
its WORLD. Its members meet in a place of their own (:func:`drumline.parallel.rendezvous.create_rendezvous` on one
machine, a TCP init method between machines), as members of a WORLD do: shared memory and no listener on one machine,
gloo elsewhere. Only CPU tensors, objects and barriers.
"""

from __future__ import annotations

from types import TracebackType

from drumline.errors import ConfigError
from drumline.parallel.c10d import Maker, ProcessGroup
from drumline.parallel.groups import GroupCoordinator
from drumline.parallel.layout import GroupKind
from drumline.parallel.rendezvous import memory_of
from drumline.parallel.shm import World


class StatelessGroup(GroupCoordinator):
    """``size`` processes, this one at place ``rank``: all collectives of a coordinator, and :meth:`close`.

    Returns when all members are there; CollectiveError, or torch's RuntimeError or DistStoreError between machines, if
    that takes longer than ``timeout_s``, which is also the timeout of each operation. The init method is empty for a
    group of one. ``one_machine`` keeps gloo's listener on loopback.
    """

    def __init__(
        self, rank: int, size: int, init_method: str, timeout_s: float = 600.0, *, one_machine: bool = True
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not in 0..{size - 1}")
        if size > 1 and not init_method:
            raise ConfigError(f"a group of {size} processes needs an init method")
        ranks, kind = tuple(range(size)), GroupKind.WORLD
        memory = memory_of(init_method) if one_machine else None
        self._resources: list[World | Maker | ProcessGroup] = []
        if size == 1:
            super().__init__(kind, ranks, rank)
        elif memory is not None:
            world = World(memory, size, rank, timeout_s)
            self._resources = [world]
            super().__init__(kind, ranks, rank, world.group(kind, ranks))
        else:
            maker = Maker(rank, size, init_method, timeout_s, one_machine)
            gloo = maker.gloo(kind, ranks, timeout_s)
            self._resources = [maker, gloo]
            super().__init__(kind, ranks, rank, gloo, gloo)
        try:
            self.barrier()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"StatelessGroup(rank {self.rank} of {self.size})"

    def __enter__(self) -> StatelessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up memory, connections and threads. Idempotent; members that still wait get an error."""
        while self._resources:
            self._resources.pop().close()
