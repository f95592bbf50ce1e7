"""The scheduler with the simulated worker behind it: what the tests of the scheduler stand on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from drumline.engine.admission import Limits
from drumline.engine.blocks import BlockPool
from drumline.engine.prefix_table import PrefixTable
from drumline.engine.protocol import EngineRequest, RequestOutput
from drumline.engine.queue import Request
from drumline.engine.scheduler import Scheduler
from drumline.plan.memory import StepCosts
from drumline.plan.sampling import SamplingParams
from drumline.plan.step import BY_VALUE, StepOutput, StepPlan, ints

from .simulated import SimulatedWorker, next_token

VOCAB = 11
COSTS = StepCosts(row_bytes=10, value_bytes=1)


@dataclass
class Rig:
    """Scheduler and simulated worker; ``depth`` plans may be issued before the first one's output is looked at."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    chunked: bool = True
    caching: bool = True
    depth: int = 1
    micro_batches: int = 1
    policy: str = "fcfs"
    max_num_prefill_tokens: int = 0
    long_prefill_token_threshold: int = 0
    max_overtakes: int = 32
    least_micro_tokens: int = 256
    memory: int | None = None
    """Bytes that the worker has for more than ordinary steps; None: nobody asks."""
    answers_after: int = 0
    """Turns until the worker says so."""
    asked: tuple[int, str, int] | None = None
    """Turns until the answer to what, and how many bytes."""
    table: PrefixTable | None = None
    """What outlives the scheduler."""
    got: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, RequestOutput] = field(default_factory=dict)
    flight: deque[StepOutput] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size, enable_prefix_caching=self.caching, table=self.table)
        self.scheduler = Scheduler(
            Limits(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                enable_chunked_prefill=self.chunked,
                vocab_size=VOCAB,
                num_micro_batches=self.micro_batches,
                policy=self.policy,
                max_num_prefill_tokens=self.max_num_prefill_tokens,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                max_overtakes=self.max_overtakes,
                least_micro_tokens=self.least_micro_tokens,
            ),
            self.pool,
            costs=None if self.memory is None else COSTS,
        )
        self._make_room, self.scheduler._make_room = self.scheduler._make_room, self._check_room  # type: ignore[method-assign]
        self.worker = SimulatedWorker(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=VOCAB,
        )

    def issue(self) -> bool:
        if len(self.flight) >= self.depth:
            return False
        before = self.scheduler._running()
        live = [request for request in before if request.decoding and request.length < request.max_length]
        plan = self.scheduler.schedule()
        self._check_order(before)
        if self.memory is not None and self._ask() and plan is None:
            return True
        if plan is None:
            assert self.flight or not self.scheduler.has_requests, "nothing in flight, and nothing planned: a livelock"
            return False
        self.plans.append(plan)
        self._check_plan(plan, live)
        self.flight.append(self.worker.execute(plan))
        self.scheduler.check()
        return True

    def _check_room(self) -> None:
        """Nobody is preempted for a more urgent request that is not let in then, nor more than it needs."""
        scheduler, victims = self.scheduler, list[Request]()
        preempt, admit = scheduler._preempt, scheduler._admit

        def note(victim: Request) -> None:
            head = scheduler._waiting.head
            assert head is not None
            assert not scheduler._fits(head, scheduler._cached_blocks(head)), "a victim too many"
            assert all(victim.rank < other.rank for other in victims), "the wrong victim"
            victims.append(victim)
            preempt(victim)

        def clear(head: Request, cached: list[int]) -> None:
            assert all(head.priority < victim.priority for victim in victims)
            victims.clear()
            admit(head, cached)

        scheduler._preempt, scheduler._admit = note, clear  # type: ignore[method-assign]
        try:
            self._make_room()
        finally:
            del scheduler._preempt, scheduler._admit
        assert not victims, "preempted for nothing"

    def _ask(self) -> bool:
        """Ask the worker for memory that is wanted, or take its answer. False if there is nothing to ask."""
        if self.asked is None:
            if (wanted := self.scheduler.wanted) is None:
                return False
            self.asked = (self.answers_after, *wanted)
        turns, request_id, nbytes = self.asked
        self.asked = (turns - 1, request_id, nbytes)
        if turns:
            return True
        self.asked = None
        assert self.memory is not None
        if nbytes <= self.memory:
            self.scheduler.grant(request_id, nbytes)
        else:
            for output in self.scheduler.deny(request_id, nbytes, "none left"):
                self.ended[output.request_id] = output
        return True

    def _check_order(self, before: list[Request]) -> None:
        """Who was let in comes before all that wait; who was preempted comes after all that run."""
        running = self.scheduler._running()
        waiting = list(self.scheduler._waiting)
        admitted = [request for request in running if request not in before]
        assert all(request.rank < other.rank for request in admitted for other in waiting), "somebody was overtaken"
        preempted = [request for request in before if request.slot < 0]
        stayed = [request for request in before if request.slot >= 0]
        assert all(request.rank > other.rank for request in preempted for other in stayed), "the wrong victim"

    def _check_plan(self, plan: StepPlan, live: list[Request]) -> None:
        """What the simulated worker does not check itself. ``live``: those that decoded, and were not at their end."""
        started = {start.request_id for start in plan.starts}
        left = sum(request.slot >= 0 and request.id not in started for request in live)
        unknown = {output.step for output in self.flight}
        sources, counts = ints(plan.token_source).tolist(), ints(plan.num_tokens).tolist()
        decoding = sum(source != BY_VALUE for source in sources)
        for source in sources:
            gap = plan.step - source
            assert source not in unknown or gap >= min(self.micro_batches, left), "the first stage would wait"
        assert decoding <= -(-len(live) // self.micro_batches), "micro-batches are even"
        prefill = sum(count for source, count in zip(sources, counts, strict=True) if source == BY_VALUE)
        if self.max_num_prefill_tokens and self.chunked and plan.num_rows > 1:
            assert prefill <= self.max_num_prefill_tokens

    def answer(self) -> None:
        for output in self.scheduler.update(self.flight.popleft()):  # the oldest, as the core does
            assert output.request_id not in self.ended, "nothing comes after the end"
            tokens = self.got.setdefault(output.request_id, [])
            assert output.first_index == len(tokens)
            tokens += output.token_ids
            if output.finish_reason:
                self.ended[output.request_id] = output
        self.scheduler.check()

    def turn(self) -> bool:
        """What the core does in one turn. False if there is nothing left to do."""
        issued = self.issue()
        if self.flight and (not issued or len(self.flight) >= self.depth):
            self.answer()
            return True
        return issued

    def run(self, *requests: EngineRequest, turns: int = 10_000) -> None:
        for added in requests:
            self.scheduler.add(added)
        for _ in range(turns):
            if not self.turn():
                break
        else:
            raise AssertionError("it does not end")
        assert not self.scheduler.has_requests
        assert self.pool.num_free == self.num_blocks


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    eos: tuple[int, ...] = (),
    salt: str = "",
    priority: int = 0,
    **sampling: object,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=params,
        seed=sum(prompt) % 3,
        eos_token_ids=list(eos),
        cache_salt=salt,
        priority=priority,
    )


def expected(req: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """What the simulated model gives this request, alone."""
    history = list(req.prompt_token_ids)
    stop = set(req.sampling.stop_token_ids or ()) | (set() if req.sampling.ignore_eos else set(req.eos_token_ids))
    while True:
        history.append(next_token(req.seed, history, VOCAB))
        outputs = history[len(req.prompt_token_ids) :]
        if outputs[-1] in stop:
            return outputs, "stop"
        if len(outputs) == req.sampling.max_tokens or len(history) == max_model_len:
            return outputs, "length"


def check_all(rig: Rig, requests: list[EngineRequest]) -> None:
    for req in requests:
        tokens, reason = expected(req, rig.max_model_len)
        assert rig.got[req.request_id] == tokens
        assert rig.ended[req.request_id].finish_reason == reason
