"""The scheduler: events in (add, abort, output of a step), plans out. Pure: no clock, no I/O, no threads.

Continuous batching over a paged KV cache. Each :meth:`Scheduler.schedule` first gives every decoding request its token,
then computes prompts in what is left of the budget, one after another, within ``max_num_batched_tokens`` tokens and
``max_num_seqs`` slots. A prompt longer than what is left is computed in chunks (or waits, with chunked prefill off).

**Order.** Requests have a *rank*: their priority (lower first; the same for all with the policy ``fcfs``), then their
arrival. Waiting ones are let in in order of rank: nobody overtakes the head of the queue. When blocks run out, the
running request of the greatest rank is preempted: its blocks are freed, it waits again, and is recomputed from its
tokens. With the policy ``priority``, running requests of a strictly lower urgency are preempted, too, when the head
of the queue lacks a slot or blocks and fits without them: nobody is preempted in vain.

A request gets the blocks of all its known tokens when it is let in, not chunk by chunk: a half-computed prompt never
waits for blocks. It is let in only if one block for each running request stays free, which keeps it from being
preempted at once (a lone request is always let in). Only decoding requests ask for blocks, in order of rank, and
before prompts get their rows: so a victim has no row in the plan being made yet.

**Why it cannot livelock.** Let T be the request of least rank of all that there are. 1. Once running, T is never
preempted: a victim for blocks is the last in rank, which T is only when alone, and alone it fits (:meth:`Scheduler.add`
refuses what does not); a victim for the head of the queue is less urgent than that. 2. While T waits it is the head, so
nobody else is let in; of those that run, the least in rank is not preempted either and ends, and so on, until T fits.
3. What runs gets a token in every plan (with micro-batches: in its turn), and ends after max_length of them. So T ends
or somebody comes who ranks before it, and with ``fcfs`` nobody does: whoever waits becomes T once all who arrived
before have ended. (Where prompts go first, "every plan" is one in a bounded number of plans.)

**Why nobody starves.** With ``priority``, requests may come for ever that rank before X. Each time someone is let in
while an older request waits, or is in the middle of its prompt, that is counted; after ``max_overtakes`` such times the
one of them that arrived first is *promoted*: it ranks before all that are not, for good, so it is next, and is no
victim of theirs. (Its own priority still decides whom it preempts: it waits for the slot of a more urgent request.)
So X waits at most until all that arrived before it are done, each of which is overtaken at most ``max_overtakes``
times. In the long run that takes one admission in ``max_overtakes + 1`` from the urgent ones. Counting instead of a
clock keeps it pure; ageing by virtual deadlines (arrival + priority x something) was rejected, since an old backlog
of unimportant requests would then as a whole come before every new urgent one.

**Prompts beside streams.** A long prompt computed in one step stops all running streams for as long as that takes. So
the prompt tokens of a step that has other rows are at most ``max_num_prefill_tokens``. A prompt that is alone in its
step may take the whole budget. When many arrive at once, they are finished one after another: the first token of the
first does not wait for the last. ``long_prefill_token_threshold`` limits what one prompt gets of a step.

*Prompts first.* Where that limit is set (CPUs: a step takes as long as its tokens, whoever they belong to) and all
prompts that are to be computed make up half a full step at most, steps of prompts alone go before those of the streams.
So a few short prompts are answered soonest, one by one, and streams have one gap instead of several. More prompts than
that share steps with the streams, which would pause for too long. Streams that have had their first token only are no
reason to share: where there are no others, a burst of two full steps goes first. (32 prompts of 128 tokens at once, 5 M
model, 256 prompt tokens a step: half of the first tokens come a fifth earlier, and one gap of each stream is long where
one in 27 was.) Not with ``priority`` (an unimportant prompt would hold up an urgent stream) nor with micro-batches
(stages are kept busy by both).

**Look-ahead.** Plans may be scheduled before the outputs of earlier ones are known. A request has ``tokens`` (known)
and ``pending`` (tokens that issued plans will sample). The input of its next row is then named by the step that
samples it. What that costs: a request that ends by a stop token is seen one plan late, and what that plan sampled for
it is discarded; its slot and blocks are given away in a later plan, and all ranks run plans in order, so nobody reads
what it wrote. What cannot go wrong: ``known + pending`` bounds everything, so no plan goes past max_tokens or
max_model_len. A preempted request takes the tokens that are still to come, and is let in again only after them. A
request whose bans leave no token to choose (``plan.choices``) is seen to be at its end just as late, so what workers
give for a row without a token is always discarded.

**Micro-batches.** With several pipeline stages the first one needs a sampled token that the last one has not made yet.
A row whose input token is still pending may therefore be in plan n only if plan n - num_micro_batches, or an earlier
one, samples it; a row whose input is known is free to go at once, so chunks of one prompt follow each other plan by
plan. To keep all stages busy, decoding requests are dealt out: one plan takes at most their number divided by
num_micro_batches, rounded up, those first that have waited longest since their last token. With nothing in flight
nothing is pending, so somebody can always go on. Prompts are dealt out too: a plan takes at most the tokens of all
prompts that are to be computed, or are being computed, divided by num_micro_batches (but ``least_micro_tokens``), so
that prompts of one step's size do not pass the stages as one lump, all stages idle but one. Where there are fewer
decoding requests than stages, the first stage waits whatever is done: their next plans are sent one ahead all the same,
so that it does not wait for the core, too.

**Prefix cache.** A block is made known when an issued plan computes all of its tokens and these are known: plans run in
order, so whoever shares it in a later plan reads what an earlier one wrote. Within one plan too, because each layer
writes the keys and values of the whole batch before any row reads (see ``plan.step``). At least one token of a
request is always computed, since something has to be sampled from. Hits are counted when a request is first let in;
what it finds again after a preemption is its own.

**Memory.** A request whose steps need more than ordinary ones (``plan.memory``) is let in once the workers have it: the
head of the queue says what it *wants*, whoever runs the plans asks the workers, and says :meth:`Scheduler.grant` or
:meth:`Scheduler.deny`. Denied, it waits until one that runs gives such memory back, and fails if none has any: then it
does not fit alone either. As with blocks, nobody overtakes it meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import msgspec

from drumline.engine.admission import (
    MAX_SCORED,
    MAX_SCORED_VALUES,
    MAX_START_BYTES,
    Limits,
    make_request,
    score_cost,
)
from drumline.engine.blocks import BlockPool
from drumline.engine.protocol import NO_TOKEN_LEFT, OUT_OF_MEMORY, EngineRequest, EngineStats, RequestOutput
from drumline.engine.queue import Request, WaitingQueue
from drumline.errors import RequestError
from drumline.plan.memory import Extra, StepCosts, extra_bytes
from drumline.plan.step import BY_VALUE, PromptLogprobs, SlotStart, StepOutput, StepPlan, TokenLogprobs, ints, pack

_rank = attrgetter("rank")
_number = attrgetter("number")
_last_step = attrgetter("last_step")


@dataclass(slots=True)
class _Rows:
    """The plan being made: columns of the plan (``plan.step``), as lists."""

    budget: int
    """Tokens that may still be added."""
    most_prefill: int = 0
    """Most tokens of prompts in this plan; 0: no limit but the others."""
    starts: list[SlotStart] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    token_source: list[int] = field(default_factory=list)
    block_counts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)
    """Requests of the rows that sample."""
    num_prefill: int = 0
    """Tokens of prompts (and of what is recomputed)."""
    scored: int = MAX_SCORED_VALUES
    """Log-probabilities of prompt tokens that may still be asked for; a token counts for 1 / MAX_SCORED of all at
    least."""
    start_bytes: int = 0
    """Of ``starts``."""
    prompts: dict[int, Request] = field(default_factory=dict)
    """Requests by slot whose rows compute some."""

    def pack(self, step: int, freed: list[int]) -> StepPlan:
        """The plan."""
        return StepPlan(
            step,
            self.starts,
            pack(freed),
            pack(self.slots),
            pack(self.num_tokens),
            pack(self.num_computed),
            pack(self.token_source),
            pack(self.block_counts),
            pack(self.blocks),
            pack(self.sample),
        )


@dataclass(slots=True)
class _Issued:
    """What is remembered of a plan until its output comes."""

    step: int
    requests: list[Request]
    """Those of the rows that sample."""
    slots: bytes
    """Their slots."""
    prompts: dict[int, Request]
    """Requests by slot, some of whose prompt's log-probabilities the plan computes."""
    num_prefill: int = 0
    """Tokens of prompts."""


class Scheduler:
    """See the module's text. Not thread-safe.

    Args:
        limits: checked here.
        pool: all blocks free.
        identity: of the model, for the hashes of the prefix cache.
        costs: what steps cost beyond ordinary ones; None: it is not looked at.

    """

    def __init__(self, limits: Limits, pool: BlockPool, *, identity: str = "", costs: StepCosts | None = None) -> None:
        limits.check()
        self.limits = limits
        self._costs = costs
        self._wanted: tuple[str, int] | None = None
        self._granted: tuple[str, int] = ("", 0)
        self._denied: int | None = None
        """Bytes that steps cannot have: denied to the head of the queue, for itself and those that ran."""
        self.pool = pool
        self._identity = identity
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        # The running ones, in order of rank: those in the middle of their prompt, and those that sample in every plan.
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        # No more slots than tokens of a plan, so that there is one for each running request.
        self._num_slots = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._free_slots = list(range(self._num_slots - 1, -1, -1))
        self._freed: list[int] = []
        self._issued: deque[_Issued] = deque()
        self._arrivals = 0
        self._overtakes = 0
        self._step = 0
        self._paused = 0
        """Prompt tokens computed since streams had a row."""
        self._prefill_in_flight = 0
        """Prompt tokens of plans whose output is not known yet."""
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._preemptions = 0
        self._sent_again = 0
        self._still_there = 0

    # events

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never be served; the scheduler is unchanged then."""
        self._sent_again += request.sent_again
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        new = make_request(request, self._arrivals, self.limits, self.pool, identity=self._identity)
        self._arrivals += 1
        if request.sent_again:
            self._still_there += len(self._cached_blocks(new)) * self.pool.block_size
        self._requests[new.id] = new
        self._waiting.push(new)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Drop these requests; unknown and finished ones are ignored. The ids of those that were dropped."""
        found = [request for id in dict.fromkeys(request_ids) if (request := self._requests.get(id)) is not None]
        for request in found:
            self._finish(request)
        return [request.id for request in found]

    def update(self, output: StepOutput) -> list[RequestOutput]:
        """Take the output of the oldest plan whose output is not known yet. ValueError if it is not that one's."""
        if not self._issued or self._issued[0].step != output.step:
            expected = self._issued[0].step if self._issued else None
            raise ValueError(f"output of step {output.step}, but the output of step {expected} is due")
        issued = self._issued.popleft()
        self._prefill_in_flight -= issued.num_prefill
        tokens = ints(output.tokens).tolist()
        if output.slots != issued.slots or len(tokens) != len(issued.requests):
            slots = ints(output.slots).tolist()
            raise ValueError(f"the output of step {output.step} has slots {slots}, not those of its plan")
        for entry in output.prompt_logprobs:
            self._take_prompt(issued.prompts[entry.slot], entry)
        logprobs = output.logprobs or [None] * len(tokens)
        outputs = [
            self._take(request, token, logprob)
            for request, token, logprob in zip(issued.requests, tokens, logprobs, strict=True)
            if not request.finished
        ]
        # All ranks have a part in each token. Where a step gives none, the last layer of the others may still be at it.
        self.pool.settle(output.step if issued.requests else output.step - 1)
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all known prefixes, those being computed included."""
        self.pool.forget()
        for request in self._running():
            request.shares = False

    # memory beyond ordinary steps

    @property
    def wanted(self) -> tuple[str, int] | None:
        """A request that waits for memory, and the bytes that a step may need with it, of all that need more."""
        if self._wanted is not None and self._wanted[0] not in self._requests:
            self._wanted = None
        return self._wanted

    def grant(self, request_id: str, nbytes: int) -> None:
        """The workers have it."""
        self._wanted, self._granted, self._denied = None, (request_id, nbytes), None

    def deny(self, request_id: str, nbytes: int, reason: str) -> list[RequestOutput]:
        """They have not so many bytes; the request's end, if it needs them alone. (Who ran when they were asked for may
        have ended meanwhile.)"""
        self._wanted = None
        request = self._requests.get(request_id)
        if request is None:
            return []
        if nbytes > self._sum([self._extra(request)]):
            self._denied = nbytes
            return []
        output = RequestOutput(
            request_id=request_id,
            first_index=len(request.tokens) - request.num_prompt,
            token_ids=[],
            finish_reason="error",
            stop_reason=OUT_OF_MEMORY,
            message=f"there is no memory for the log-probabilities that it asks for: {reason}",
        )
        self._finish(request)
        return [output]

    def _has_memory(self, request: Request) -> bool:
        """What steps need with this request is known to be there. Else it is wanted from now on."""
        if self._costs is None or not (own := self._extra(request)):
            return True
        held = self._extra_bytes()
        needed = self._extra_bytes(own)
        if needed <= held:
            return True
        if self._denied is not None:
            if held and needed >= self._denied:
                return False
            self._denied = None
        if self._granted[0] == request.id and needed <= self._granted[1]:
            return True
        self._wanted = request.id, needed
        return False

    def _extra_bytes(self, *more: Extra) -> int:
        """Of all that run, and ``more``."""
        extras = [self._extra(request) for request in chain(self._decoding, self._prefilling)]
        return self._sum([*extras, *more])

    def _sum(self, extras: list[Extra]) -> int:
        assert self._costs is not None
        return extra_bytes(extras, self._costs, most_rows=MAX_SCORED, most_values=MAX_SCORED_VALUES)

    @staticmethod
    def _extra(request: Request) -> Extra:
        """What a request's steps may need from now on."""
        extra = request.extra
        if extra.rows and (request.decoding or not (request.scoring or request.unscored)):
            return Extra(values=extra.values)
        return extra

    # state

    @property
    def has_requests(self) -> bool:
        """Something is running or waiting."""
        return bool(self._requests)

    @property
    def num_issued(self) -> int:
        """Plans whose output is not known yet."""
        return len(self._issued)

    def request_ids(self) -> list[str]:
        """Ids of all requests that are not finished."""
        return list(self._requests)

    def stats(self) -> EngineStats:
        """Counts of now, and since the start."""
        return EngineStats(
            num_running=self._num_running,
            num_waiting=len(self._waiting),
            kv_blocks_used=self.pool.num_used,
            kv_blocks_total=self.pool.num_blocks,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            steps=self._step,
            sent_again=self._sent_again,
            still_there=self._still_there,
        )

    @property
    def _num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def _running(self) -> list[Request]:
        """All running requests, in order of rank."""
        return sorted(self._decoding + self._prefilling, key=_rank)

    # the plan

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if nothing can be computed before another output, or another request, comes."""
        if self.limits.policy == "priority":
            self._promote()
            self._make_room()
        elif (rows := self._prompts_first()) is not None:
            return self._issue(rows)
        admit = True
        self._paused = 0
        while True:
            rows = _Rows(self.limits.max_num_batched_tokens, self._prefill_share())
            preempted = self._add_decoding(rows)
            admit = admit and not preempted
            self._add_prompts(rows, admit=admit)
            if not (rows.slots or admit or preempted):
                self._add_prompts(rows, admit=True)
            if rows.slots:
                return self._issue(rows)
            if not preempted:
                return None
            # A micro-batch gave up its own blocks, and somebody else can use them: once more.

    def _prompts_first(self) -> _Rows | None:
        """Rows of prompts alone, where they go before running streams; see "Prompts first" above."""
        limits = self.limits
        if not limits.max_num_prefill_tokens or limits.num_micro_batches > 1 or not self._decoding:
            return None
        if not self._prefilling and not (self._waiting and self._free_slots):
            return None
        left = todo = self._longest_pause() - self._paused
        for request in chain(self._prefilling, self._waiting.in_any_order()):  # ends early where many wait
            todo -= request.length - request.num_computed
            if todo < 0:
                return None
        rows = _Rows(min(limits.max_num_prefill_tokens, left))
        self._add_prompts(rows, admit=True)
        self._paused += rows.num_prefill
        return rows if rows.slots else None

    def _longest_pause(self) -> int:
        """Prompt tokens for which running streams may pause; fewer where one has had more than its first token."""
        full = self.limits.max_num_batched_tokens
        return full // 2 if any(r.length > r.num_prompt + 1 for r in self._decoding) else 2 * full

    def _issue(self, rows: _Rows) -> StepPlan:
        plan = rows.pack(self._step, self._freed)
        slots = plan.slots
        if len(rows.sampling) < len(rows.slots):
            slots = pack([slot for slot, sample in zip(rows.slots, rows.sample, strict=True) if sample])
        self._issued.append(_Issued(self._step, rows.sampling, slots, rows.prompts, rows.num_prefill))
        self._prefill_in_flight += rows.num_prefill
        self._freed = []
        self._step += 1
        return plan

    def _add_decoding(self, rows: _Rows) -> bool:
        """Rows for decoding requests, in order of rank. True if somebody was preempted."""
        step, preempted = self._step, False
        slots, computed, source, sampling = rows.slots, rows.num_computed, rows.token_source, rows.sampling
        grown: list[int] = []
        turn = self._decoding.copy() if self.limits.num_micro_batches == 1 else self._micro_batch()
        for request in turn:
            length = request.length
            if length > request.free_run:
                if length >= request.max_length or request.slot < 0:  # its last token is on the way; preempted just now
                    continue
                if not self.pool.num_free:
                    preempted = True
                    if not self._free_one_for(request):
                        continue
                rows.blocks += self._grow(request)
                grown.append(len(slots))
            slots.append(request.slot)
            computed.append(length - 1)
            source.append(request.last_step)
            sampling.append(request)
            request.num_computed = length
            request.length = length + 1
            request.last_step = step
        count = len(slots)
        rows.budget -= count
        rows.num_tokens = [1] * count
        rows.sample = [1] * count
        rows.block_counts = [0] * count
        for row in grown:
            rows.block_counts[row] = 1
        return preempted

    def _grow(self, request: Request) -> list[int]:
        """One more block for a request."""
        blocks = self.pool.allocate(1)
        request.blocks += blocks
        request.free_run = min(len(request.blocks) * self.pool.block_size, request.max_length - 1)
        return blocks

    def _free_one_for(self, request: Request) -> bool:
        """Preempt from the last in rank on until a block is free. False if the request itself was preempted."""
        while not self.pool.num_free and request.slot >= 0:
            lasts = [running[-1] for running in (self._decoding, self._prefilling) if running]
            self._preempt(max(lasts, key=_rank))
        return request.slot >= 0

    def _micro_batch(self) -> list[Request]:
        """Decoding requests whose turn it is, in order of rank: see "Micro-batches" above."""
        batches = self.limits.num_micro_batches
        live = [request for request in self._decoding if request.length < request.max_length]
        share = -(-len(live) // batches)
        latest = self._step - min(batches, len(live))
        able = [r for r in live if not r.pending or (r.last_step <= latest and r.pending < 2)]
        if len(able) > share:
            able = sorted(sorted(able, key=_last_step)[:share], key=_rank)
        return able

    def _prefill_share(self) -> int:
        """Most prompt tokens of one of several micro-batches; 0: no limit. See "Micro-batches" above."""
        batches = self.limits.num_micro_batches
        if batches == 1 or not self.limits.enable_chunked_prefill:
            return 0
        todo, enough = self._prefill_in_flight, batches * self.limits.max_num_batched_tokens
        for request in chain(self._prefilling, self._waiting.in_any_order() if self._free_slots else ()):
            if todo >= enough:  # full plans follow each other anyhow
                return 0
            todo += request.length - request.num_computed
        return max(-(-todo // batches), self.limits.least_micro_tokens)

    def _add_prompts(self, rows: _Rows, *, admit: bool) -> None:
        """Rows for prompts, in order of rank: of requests that run, and with ``admit`` of those that can be let in."""
        index = 0
        while True:
            request = self._prefilling[index] if index < len(self._prefilling) else None
            head = self._waiting.head if admit else None
            if head is not None and (request is None or head.rank < request.rank):
                request = head
            if request is None or not (room := self._room(rows)):
                return
            if request is head and not self._let_in(head, room):
                admit = False
            elif not self._add_chunk(rows, request, room):
                return
            elif not request.decoding:
                index += 1

    def _room(self, rows: _Rows) -> int:
        """Tokens that the next prompt of this plan may have."""
        limits, room = self.limits, rows.budget
        if limits.max_num_prefill_tokens and rows.slots and (rows.num_prefill or limits.enable_chunked_prefill):
            room = min(room, max(limits.max_num_prefill_tokens - rows.num_prefill, 0))
        if limits.long_prefill_token_threshold and len(self._requests) > 1 and limits.enable_chunked_prefill:
            room = min(room, limits.long_prefill_token_threshold)
        if rows.most_prefill:
            room = min(room, max(rows.most_prefill - rows.num_prefill, 0))
        return room

    def _add_chunk(self, rows: _Rows, request: Request, room: int) -> bool:
        """Compute the next tokens of a prompt, ``room`` at most. False if it gets none in this plan."""
        computed = request.num_computed
        left = request.length - computed
        count = min(left, room)
        if count < left and not self.limits.enable_chunked_prefill:
            return False
        if not request.announced and not self._has_space(rows, request):
            return False
        if request.scoring:
            count = self._score(rows, request, count)
            if not count:
                return False
        blocks = [] if request.announced else self._announce(rows, request)
        rows.slots.append(request.slot)
        rows.num_tokens.append(count)
        rows.num_computed.append(computed)
        rows.token_source.append(request.last_step)
        rows.block_counts.append(len(blocks))
        rows.blocks += blocks
        rows.sample.append(int(count == left))
        rows.budget -= count
        rows.num_prefill += count
        request.num_computed = computed + count
        if count == left:
            rows.sampling.append(request)
            request.length += 1
            request.last_step = self._step
            request.free_run = min(len(request.blocks) * self.pool.block_size, request.max_length - 1)
            request.decoding = True
            self._prefilling.remove(request)
            insort(self._decoding, request, key=_rank)
        if request.num_computed >= request.next_register:
            self._register(request, self._step)
        return True

    def _score(self, rows: _Rows, request: Request, count: int) -> int:
        """Note that log-probabilities of prompt tokens come with a row of ``count`` tokens; how many it may have."""
        scored = min(request.num_computed + count, request.num_prompt - 1) - request.num_computed
        if scored <= 0:
            return count
        cost = score_cost(request.sampling)
        if scored * cost > rows.scored:
            scored = count = rows.scored // cost if self.limits.enable_chunked_prefill else 0
        rows.scored -= scored * cost
        if count:
            rows.prompts[request.slot] = request
        return count

    @staticmethod
    def _has_space(rows: _Rows, request: Request) -> bool:
        """The plan has space for one more start."""
        needed = 4 * (len(request.tokens) + len(request.blocks)) + request.sampling_bytes
        if rows.starts and rows.start_bytes + needed > MAX_START_BYTES:
            return False
        rows.start_bytes += needed
        return True

    def _announce(self, rows: _Rows, request: Request) -> list[int]:
        """Tell the workers of a request in its slot; its blocks, which they are to be told of too."""
        sampling = request.sampling
        if request.prompt_logprobs is not None and not request.scoring:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        rows.starts.append(
            SlotStart(
                slot=request.slot,
                request_id=request.id,
                tokens=pack(request.tokens),
                num_prompt=request.num_prompt,
                sampling=sampling,
            )
        )
        request.announced = True
        return request.blocks

    # who is let in

    def _let_in(self, request: Request, room: int) -> bool:
        """Give the head of the queue a slot and blocks, if there are."""
        if not self._free_slots or request.pending:  # what an issued plan samples for it has not come yet
            return False
        cached = self._cached_blocks(request)
        todo = len(request.tokens) - len(cached) * self.pool.block_size
        if (todo > room and not self.limits.enable_chunked_prefill) or not self._fits(request, cached):
            return False
        if not self._has_memory(request):
            return False
        self._admit(request, cached)
        return True

    def _fits(self, request: Request, cached: list[int]) -> bool:
        """A slot and all blocks for a request, and one block for each that runs, are free."""
        needed = self.pool.blocks_for(len(request.tokens)) - len(cached) + self.pool.num_idle(cached)
        assert self._num_running or needed <= self.pool.num_free, "add() let in what cannot fit"
        return bool(self._free_slots) and needed + self._num_running <= max(
            self.pool.num_free, 0 if self._num_running else needed
        )

    def _cached_blocks(self, request: Request) -> list[int]:
        """Known blocks of the request's prefix; never all of its tokens. None if the prompt's log-probabilities are
        wanted, which come from computing it."""
        if not self.pool.enable_prefix_caching or request.unscored:
            return []
        request.chain.extend(request.tokens)
        usable = (len(request.tokens) - 1) // self.pool.block_size
        return self.pool.lookup(request.chain.hashes[:usable])

    def _admit(self, request: Request, cached: list[int]) -> None:
        pool = self.pool
        self._waiting.remove(request)
        pool.share(cached)
        request.blocks = cached + pool.allocate(pool.blocks_for(len(request.tokens)) - len(cached))
        request.slot = self._free_slots.pop()
        request.announced = False
        request.num_computed = len(cached) * pool.block_size
        request.next_register = (len(cached) + 1) * pool.block_size
        request.last_step = BY_VALUE
        request.shares = True
        request.scoring = request.unscored
        if request.num_cached < 0:
            request.num_cached = request.num_computed
            self._prefix_queries += len(request.tokens) if pool.enable_prefix_caching else 0
            self._prefix_hits += request.num_computed
        insort(self._prefilling, request, key=_rank)
        oldest = self._oldest()
        if oldest is not None and oldest.number < request.number and not oldest.promoted:
            self._overtakes += 1

    def _make_room(self) -> None:
        """Let urgent requests in at the cost of running ones that are less urgent."""
        while (head := self._waiting.head) is not None and not head.pending and self._has_memory(head):
            victims = [other for other in self._running() if not other.promoted and other.priority > head.priority]
            if not victims:
                return
            cached = self._cached_blocks(head)
            if self._fits(head, cached):
                return
            victims = self._victims_for(head, cached, victims)
            if not victims:
                return
            for victim in victims:
                self._preempt(victim)
            # Their own blocks may have become known meanwhile: these are free, so that sharing them costs as much.
            self._admit(head, self._cached_blocks(head))

    def _victims_for(self, head: Request, cached: list[int], victims: list[Request]) -> list[Request]:
        """Those to preempt so that the head of the queue fits, the last in rank first; none if all are not enough.

        A block becomes free when the last table that has it goes; if the head shares it, it is needed then.
        """
        pool, left = self.pool, self._num_running
        free, needed = pool.num_free, pool.blocks_for(len(head.tokens)) - len(cached) + pool.num_idle(cached)
        if needed + left - len(victims) > free + sum(len(victim.blocks) for victim in victims):
            return []  # even if none of their blocks were shared: spares counting them
        known, gone = set(cached), Counter[int]()
        for count, victim in enumerate(reversed(victims), start=1):
            freed = pool.freed_with(victim.blocks, gone)
            free += len(freed)
            needed += len(known.intersection(freed))
            if left == count or needed + left - count <= free:
                return victims[: -count - 1 : -1]
        return []

    def _promote(self) -> None:
        """Let the request that arrived first of those that wait come first, if they were overtaken for too long."""
        if self._overtakes < self.limits.max_overtakes:
            return
        self._overtakes = 0
        request = self._oldest()
        if request is None or request.promoted:
            return
        waits = request.slot < 0
        if waits:
            self._waiting.remove(request)
        else:
            self._prefilling.remove(request)
        request.rank = (0, 0, request.number)
        if waits:
            self._waiting.push(request)
        else:
            insort(self._prefilling, request, key=_rank)

    def _oldest(self) -> Request | None:
        """The request that arrived first of those that wait or are in the middle of their prompt."""
        candidates = [request for request in (self._waiting.oldest, *self._prefilling) if request is not None]
        return min(candidates, key=_number, default=None)

    def _register(self, request: Request, due: int) -> None:
        """Tell the prefix cache of blocks that are full, computed and known. ``due``: the last step that has a part in
        that, or a later one."""
        size = self.pool.block_size
        if not self.pool.enable_prefix_caching or not request.shares:
            return
        full = min(request.num_computed, len(request.tokens)) // size
        first = request.next_register // size - 1
        if full > first:
            request.chain.extend(request.tokens)
            for index in range(first, full):
                self.pool.register(request.blocks[index], request.chain.hashes[index], due)
            request.next_register = (full + 1) * size

    # life of a request

    def _take(self, request: Request, token: int, logprob: TokenLogprobs | None) -> RequestOutput:
        """Append a sampled token to an unfinished request; end it where it ends."""
        tokens = request.tokens
        index = len(tokens) - request.num_prompt
        tokens.append(token)
        output = RequestOutput(
            request_id=request.id, first_index=index, token_ids=[token], num_cached_tokens=request.num_cached
        )
        if request.preemptions:
            output.num_preemptions = request.preemptions
        if request.sampling.logprobs >= 0:
            output.logprobs = [logprob]
        if index == 0 and request.prompt_logprobs:
            output.prompt_logprobs = request.prompt_logprobs
        if token in request.end_tokens:
            output.finish_reason = "stop"
        elif token in request.stop_tokens:
            output.finish_reason, output.stop_reason = "stop", token
        elif len(tokens) >= request.max_length:
            output.finish_reason = "length"
        elif request.dead_ends is not None and request.dead_ends.at(tokens, request.num_prompt):
            output.finish_reason, output.stop_reason = "stop", NO_TOKEN_LEFT
        if len(tokens) >= request.next_register and request.slot >= 0:
            self._register(request, self._step - 1)
        if output.finish_reason is not None:
            self._finish(request)
        return output

    @staticmethod
    def _take_prompt(request: Request, entry: PromptLogprobs) -> None:
        """Keep log-probabilities of a prompt; after a preemption some come again."""
        known = request.prompt_logprobs
        assert known is not None, "log-probabilities came that nobody asked for"
        known += entry.rows[max(len(known) + 1 - entry.first, 0) :]

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it will be recomputed from its tokens."""
        self._register(request, self._step)
        self._release(request)
        self._waiting.push(request)
        request.preemptions += 1
        self._preemptions += 1

    def _finish(self, request: Request) -> None:
        request.finished = True
        del self._requests[request.id]
        if request.slot >= 0:
            self._release(request)
        else:
            self._waiting.remove(request)

    def _release(self, request: Request) -> None:
        """Take slot and blocks back. They may be used again from the next plan on, which tells the workers so."""
        running = self._decoding if request.decoding else self._prefilling
        del running[bisect_left(running, request.rank, key=_rank)]
        if request.announced:
            self._freed.append(request.slot)
        self._free_slots.append(request.slot)
        self.pool.free(request.blocks)
        request.slot, request.blocks, request.num_computed, request.free_run = -1, [], 0, 0
        request.announced = request.decoding = False

    def check(self) -> None:
        """Raise AssertionError if slots, blocks or queues contradict each other (for tests; linear time)."""
        self.pool.check()
        running, waiting = self._running(), list(self._waiting)
        slots = [request.slot for request in running]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "a slot is lost"
        assert len(running) + len(waiting) == len(self._requests), "a request is lost"
        for queue in (self._decoding, self._prefilling):
            assert queue == sorted(queue, key=_rank), "running requests are out of order"
        if self.limits.policy == "fcfs":
            order = [request.number for request in running + waiting]
            assert order == sorted(order), "somebody was overtaken"
        tables = {block for request in running for block in request.blocks}
        assert len(tables) == self.pool.num_used, "blocks are used by nobody"
        for request in running:
            assert len(request.blocks) >= self.pool.blocks_for(request.num_computed), "a table is too short"
            assert request.length <= request.max_length, "a request goes too far"
            assert not request.decoding or request.num_computed == request.length - 1
