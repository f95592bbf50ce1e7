"""What the scheduler knows of a request, and the queue of those that wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from drumline.engine.blocks import HashChain
from drumline.plan.choices import DeadEnds
from drumline.plan.memory import ORDINARY, Extra
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import BY_VALUE, TokenLogprobs

Rank = tuple[int, int, int]
"""0 if it was promoted, else 1; priority (of promoted ones: 0); number of arrival. The least comes first."""


@dataclass(eq=False, slots=True)
class Request:
    """One request in the scheduler."""

    id: str
    number: int
    """Order of arrival."""
    priority: int
    """Lower comes first; 0 for all with the policy ``fcfs``."""
    tokens: list[int]
    """Prompt and known outputs."""
    num_prompt: int
    max_length: int
    """Prompt plus output in tokens, at which it ends."""
    sampling: SlotSampling
    end_tokens: frozenset[int]
    """End-of-sequence tokens (empty with ignore_eos)."""
    stop_tokens: frozenset[int]
    chain: HashChain
    rank: Rank
    prompt_logprobs: list[TokenLogprobs] | None
    """Those of the prompt's tokens 1, 2, ... that are known; None if they were not asked for."""
    extra: Extra = ORDINARY
    """What its steps may need beyond ordinary ones."""
    dead_ends: DeadEnds | None = None
    """Where its constraints leave no token, it ends; None: nowhere."""
    scoring: bool = False
    """The workers were told to compute them when it was let in."""
    sampling_bytes: int = 64
    """What ``sampling`` takes in a plan, at most."""
    slot: int = -1
    """-1: it is waiting."""
    announced: bool = False
    """The workers know that it is in its slot, and its blocks."""
    decoding: bool = False
    """Its prompt is computed; each of its rows samples."""
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    """Known tokens, and those that issued plans will sample for it."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache after all issued plans."""
    free_run: int = 0
    """While it decodes: the greatest length at which its next row is a plain one; above, it needs a block, or its last
    token is on the way."""
    next_register: int = 0
    """Length at which its next block is full, so that the prefix cache is to be told of it."""
    last_step: int = BY_VALUE
    """The step that samples, or sampled, its last token; BY_VALUE if the worker was given that token."""
    num_cached: int = -1
    """Prompt tokens found in the prefix cache when it was first let in; -1: it never was."""
    preemptions: int = 0
    """How often it was preempted."""
    shares: bool = True
    """Its blocks may become known prefixes (not after the cache was reset under it)."""
    finished: bool = False

    @property
    def pending(self) -> int:
        """Tokens that issued plans will sample for it."""
        return self.length - len(self.tokens)

    @property
    def promoted(self) -> bool:
        """It was overtaken for too long, and comes before all that were not."""
        return self.rank[0] == 0

    @property
    def unscored(self) -> bool:
        """Log-probabilities of its prompt are wanted and not all known."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1


class WaitingQueue:
    """Requests by rank, and the one that arrived first. Removal is lazy, so that every call is O(log n) amortised."""

    def __init__(self) -> None:
        self._members: dict[int, Request] = {}
        self._by_rank: list[tuple[Rank, Request]] = []
        self._by_number: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """In order of rank."""
        return iter(sorted(self._members.values(), key=lambda request: request.rank))

    def in_any_order(self) -> Iterable[Request]:
        """All, without the sort that iteration costs."""
        return self._members.values()

    def push(self, request: Request) -> None:
        """Add a request; its rank stays what it is until it is removed."""
        self._members[request.number] = request
        heappush(self._by_rank, (request.rank, request))
        heappush(self._by_number, request.number)

    def remove(self, request: Request) -> None:
        """Take out a request that is in it."""
        del self._members[request.number]
        if len(self._by_rank) > 2 * len(self._members) + 64:
            self._by_rank = [(other.rank, other) for other in self._members.values()]
            heapify(self._by_rank)
        if len(self._by_number) > 2 * len(self._members) + 64:
            self._by_number = list(self._members)
            heapify(self._by_number)

    @property
    def head(self) -> Request | None:
        """The one of least rank."""
        heap = self._by_rank
        while heap:
            rank, request = heap[0]
            if request.rank == rank and request.number in self._members:
                return request
            heappop(heap)
        return None

    @property
    def oldest(self) -> Request | None:
        """The one that arrived first."""
        heap = self._by_number
        while heap:
            request = self._members.get(heap[0])
            if request is not None:
                return request
            heappop(heap)
        return None
