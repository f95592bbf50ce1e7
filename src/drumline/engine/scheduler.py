"""The scheduler: events in (add, abort, output of a step), plans out. Pure: no clock, no I/O, no threads.

Continuous batching over a paged KV cache. Each :meth:`Scheduler.schedule` first gives tokens to running requests,
oldest first, then lets waiting ones in, oldest first, within ``max_num_batched_tokens`` tokens and ``max_num_seqs``
slots. A prompt longer than what is left of the budget is computed in chunks (or waits, with chunked prefill off).

**Order.** Requests are served strictly in order of arrival (``priority`` is not looked at yet): nobody overtakes the
head of the waiting queue, and when blocks run out the latest arrived running request is preempted (its blocks are
freed, it goes to the front of the waiting queue and is recomputed from its tokens). So every running request is older
than every waiting one, and:

- the oldest request is never preempted, gets tokens in every plan, and ends: no livelock. It always fits, because
  :meth:`Scheduler.add` refuses what would not fit the pool alone;
- a victim has no row in the plan being made yet, since rows are given oldest first;
- at most one request is in the middle of its prompt, and it is the youngest running one.

A request gets the blocks of all its known tokens when it is let in, not chunk by chunk: a half-computed prompt never
waits for blocks. It is let in only if one block for each running request stays free, which keeps it from being
preempted at once (a lone request is always let in).

**Look-ahead.** Plans may be scheduled before the outputs of earlier ones are known. A request has ``tokens`` (known)
and ``pending`` (tokens that issued plans will sample). The input of its next row is then named by the step that
samples it. What that costs: a request that ends by a stop token is seen one plan late, and what that plan sampled for
it is discarded; its slot and blocks are given away in a later plan, and all ranks run plans in order, so nobody reads
what it wrote. What cannot go wrong: ``known + pending`` bounds everything, so no plan goes past max_tokens or
max_model_len. A preempted request takes the tokens that are still to come, and is let in again only after them.

**Micro-batches.** With several pipeline stages the first one needs a sampled token that the last one has not made yet.
A row whose input token is still pending may therefore be in plan n only if plan n - num_micro_batches, or an earlier
one, samples it; a row whose input is known is free to go at once, so chunks of one prompt follow each other plan by
plan. To keep all stages busy, decoding requests are dealt out: one plan takes at most their number divided by
num_micro_batches, rounded up, those first that have waited longest since their last token. With nothing in flight
nothing is pending, so somebody can always go on.

**Prefix cache.** A block is made known when an issued plan computes all of its tokens and these are known: plans run in
order, so whoever shares it in a later plan reads what an earlier one wrote. Within one plan too, because each layer
writes the keys and values of the whole batch before any row reads (see ``plan.step``). At least one token of a
request is always computed, since something has to be sampled from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from drumline.engine.blocks import BlockPool, HashChain
from drumline.engine.protocol import EngineRequest, EngineStats, RequestOutput
from drumline.errors import RequestError
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import BY_VALUE, PromptLogprobs, SlotStart, StepOutput, StepPlan, TokenLogprobs, ints, pack

MAX_SCORED = 256
"""Prompt tokens whose log-probabilities one plan computes: each takes a row of logits over the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a plan never exceeds."""

    max_num_seqs: int
    """Rows of one plan, and slots."""
    max_num_batched_tokens: int
    """Tokens of one plan."""
    max_model_len: int
    """Prompt plus output of one request in tokens."""
    enable_chunked_prefill: bool = True
    vocab_size: int = 0
    """Token ids of a prompt must be below this; 0: not checked."""
    num_micro_batches: int = 1
    """Pipeline stages, which work on as many plans at the same time."""

    def check(self) -> None:
        """Raise ValueError if no request, or not one of max_model_len, could ever be served."""
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.num_micro_batches) < 1:
            raise ValueError(f"every limit must be at least 1: {self}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"with chunked prefill off a prompt must fit into one step, but max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) is less than max_model_len ({self.max_model_len})"
            )


@dataclass(eq=False, slots=True)
class Request:
    """One request in the scheduler."""

    id: str
    number: int
    """Order of arrival."""
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
    slot: int = -1
    """-1: it is waiting."""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in the cache after all issued plans."""
    next_register: int = 0
    """Length at which its next block is full, so that the prefix cache is to be told of it."""
    pending: int = 0
    """Tokens that issued plans will sample for it."""
    last_step: int = BY_VALUE
    """The step that samples, or sampled, its last token; BY_VALUE if the worker was given that token."""
    num_cached: int = -1
    """Prompt tokens found in the prefix cache when it was first let in; -1: it never was."""
    shares: bool = True
    """Its blocks may become known prefixes (not after the cache was reset under it)."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Those of the prompt's tokens 1, 2, ... that are known; None if they were not asked for."""
    scoring: bool = False
    """The workers were told to compute them when it was let in."""
    finished: bool = False

    @property
    def length(self) -> int:
        """Known and pending tokens."""
        return len(self.tokens) + self.pending


@dataclass(slots=True)
class _Rows:
    """The plan being made."""

    budget: int
    """Tokens that may still be added."""
    starts: list[SlotStart] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    """Slot, tokens, computed before, token source, blocks appended, sample: a tuple for each row, because one append
    a row is what 256 rows a step can afford."""
    blocks: list[int] = field(default_factory=list)
    sampling: list[tuple[Request, int, int]] = field(default_factory=list)
    """Rows that sample: request, slot, output index."""
    scored: int = MAX_SCORED
    """Prompt tokens whose log-probabilities may still be computed."""
    prompts: dict[int, Request] = field(default_factory=dict)
    """Requests by slot whose rows compute some."""

    def pack(self, step: int, freed: list[int]) -> StepPlan:
        """The plan."""
        slots, num_tokens, num_computed, token_source, block_counts, sample = map(pack, zip(*self.rows, strict=True))
        return StepPlan(
            step=step,
            starts=self.starts,
            freed=pack(freed),
            slots=slots,
            num_tokens=num_tokens,
            num_computed=num_computed,
            token_source=token_source,
            block_counts=block_counts,
            blocks=pack(self.blocks),
            sample=sample,
        )


@dataclass(slots=True)
class _Issued:
    """What is remembered of a plan until its output comes: the rows that sample, as (request, slot, output index)."""

    step: int
    rows: list[tuple[Request, int, int]]
    prompts: dict[int, Request]
    """Requests by slot, some of whose prompt's log-probabilities the plan computes."""


class Scheduler:
    """See the module's text. Not thread-safe."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        limits.check()
        self.limits = limits
        self.pool = pool
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed: list[int] = []
        self._issued: deque[_Issued] = deque()
        self._arrivals = 0
        self._step = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._preemptions = 0

    # events

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never be served; the scheduler is unchanged then."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        new = self._admissible(request)
        self._arrivals += 1
        self._requests[new.id] = new
        self._waiting.append(new)

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
        slots, tokens = ints(output.slots).tolist(), ints(output.tokens).tolist()
        if slots != [slot for _, slot, _ in issued.rows] or len(tokens) != len(slots):
            raise ValueError(f"the output of step {output.step} has slots {slots}, not those of its plan")
        for entry in output.prompt_logprobs:
            self._take_prompt(issued.prompts[entry.slot], entry)
        logprobs = output.logprobs or [None] * len(tokens)
        results = []
        for (request, _, index), token, logprob in zip(issued.rows, tokens, logprobs, strict=True):
            if not request.finished:
                results.append(self._take(request, index, token, logprob))
        return results

    def reset_prefix_cache(self) -> None:
        """Forget all known prefixes, those being computed included."""
        self.pool.forget()
        for request in self._running:
            request.shares = False

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
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_blocks_used=self.pool.num_used,
            kv_blocks_total=self.pool.num_blocks,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            steps=self._step,
        )

    # the plan

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if nothing can be computed before another output, or another request, comes."""
        rows = _Rows(budget=self.limits.max_num_batched_tokens)
        preempted = self._schedule_running(rows)
        if preempted and not rows.rows:  # a micro-batch of one gave up its own blocks; somebody else can use them
            return self.schedule()
        if not preempted:
            self._schedule_waiting(rows)
        if not rows.rows:
            return None
        plan = rows.pack(self._step, self._freed)
        self._issued.append(_Issued(self._step, rows.sampling, rows.prompts))
        self._freed = []
        self._step += 1
        return plan

    def _schedule_running(self, rows: _Rows) -> bool:
        """Rows for running requests, oldest first. True if one was preempted."""
        pool, size, running = self.pool, self.pool.block_size, self._running
        turn = running if self.limits.num_micro_batches == 1 else self._micro_batch()
        preempted = False
        index = 0
        while index < len(turn) and rows.budget > 0:
            request = turn[index]
            index += 1
            if len(request.tokens) + request.pending >= request.max_length:  # its last token is on the way
                continue
            if request.slot < 0:  # preempted just now
                continue
            if request.num_computed < len(request.blocks) * size:
                self._add_row(rows, request, [])
                continue
            while not pool.num_free:
                preempted = True
                victim = running[-1]
                self._preempt(victim)
                if victim is request:
                    return True
            self._add_row(rows, request, pool.allocate(1))
        return preempted

    def _micro_batch(self) -> list[Request]:
        """Running requests whose turn it is, oldest first: see "Micro-batches" above."""
        batches = self.limits.num_micro_batches
        latest = self._step - batches
        decoding, prefilling = [], []
        for request in self._running:
            if request.length < request.max_length:
                (decoding if request.num_computed + 1 >= request.length else prefilling).append(request)
        share = -(-len(decoding) // batches)
        able = [request for request in decoding if not request.pending or request.last_step <= latest]
        if len(able) > share:
            able = sorted(able, key=lambda request: request.last_step)[:share]
        return sorted(able + prefilling, key=lambda request: request.number)

    def _schedule_waiting(self, rows: _Rows) -> None:
        """Let waiting requests in, oldest first, and give them rows."""
        while self._waiting and rows.budget > 0 and self._free_slots:
            request = self._waiting[0]
            if request.pending:  # preempted, and what an issued plan samples for it has not come yet
                return
            cached = self._cached_blocks(request)
            num_cached = len(cached) * self.pool.block_size
            todo = len(request.tokens) - num_cached
            if not self.limits.enable_chunked_prefill and todo > rows.budget:
                return
            missing = self.pool.blocks_for(len(request.tokens)) - len(cached)
            if missing + self.pool.num_idle(cached) + len(self._running) > self.pool.num_free:
                if self._running:
                    return
                assert missing + self.pool.num_idle(cached) <= self.pool.num_free, "add() let in what cannot fit"
            self._waiting.popleft()
            self._admit(rows, request, cached)
            self._add_row(rows, request, cached + self.pool.allocate(missing))

    def _cached_blocks(self, request: Request) -> list[int]:
        """Known blocks of the request's prefix; never all of its tokens. None if the prompt's log-probabilities are
        wanted, which come from computing it."""
        if not self.pool.enable_prefix_caching or self._unscored(request):
            return []
        request.chain.extend(request.tokens)
        usable = (len(request.tokens) - 1) // self.pool.block_size
        return self.pool.lookup(request.chain.hashes[:usable])

    def _admit(self, rows: _Rows, request: Request, cached: list[int]) -> None:
        self.pool.share(cached)
        request.slot = self._free_slots.pop()
        request.num_computed = len(cached) * self.pool.block_size
        request.next_register = (len(cached) + 1) * self.pool.block_size
        request.last_step = BY_VALUE
        request.shares = True
        request.scoring = self._unscored(request)
        sampling = request.sampling
        if request.prompt_logprobs is not None and not request.scoring:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        if request.num_cached < 0:
            request.num_cached = request.num_computed
            self._prefix_queries += len(request.tokens) if self.pool.enable_prefix_caching else 0
            self._prefix_hits += request.num_computed
        self._running.append(request)
        rows.starts.append(
            SlotStart(
                slot=request.slot,
                request_id=request.id,
                tokens=pack(request.tokens),
                num_prompt=request.num_prompt,
                sampling=sampling,
            )
        )

    def _add_row(self, rows: _Rows, request: Request, appended: list[int]) -> None:
        """Compute the request's next tokens, as many as the budget allows."""
        known, computed, pending = len(request.tokens), request.num_computed, request.pending
        left = known + pending - computed
        count = min(left, rows.budget)
        if request.scoring:
            count = self._score(rows, request, count)
        rows.rows.append((request.slot, count, computed, request.last_step, len(appended), int(count == left)))
        if appended:
            request.blocks += appended
            rows.blocks += appended
        rows.budget -= count
        request.num_computed = computed + count
        if count == left:
            rows.sampling.append((request, request.slot, known + pending - request.num_prompt))
            request.pending = pending + 1
            request.last_step = self._step
        if request.num_computed >= request.next_register:
            self._register(request)

    def _score(self, rows: _Rows, request: Request, count: int) -> int:
        """Note that log-probabilities of prompt tokens come with a row of ``count`` tokens; how many it may have."""
        scored = min(request.num_computed + count, request.num_prompt - 1) - request.num_computed
        if scored <= 0:
            return count
        rows.prompts[request.slot] = request
        if scored >= rows.scored and self.limits.enable_chunked_prefill:
            count = min(count, rows.scored)
            rows.budget = count  # the rest of the plan's tokens stays unused: it goes on with this row in the next one
        rows.scored -= scored
        return count

    @staticmethod
    def _unscored(request: Request) -> bool:
        """Log-probabilities of its prompt are wanted and not all known."""
        return request.prompt_logprobs is not None and len(request.prompt_logprobs) < request.num_prompt - 1

    def _register(self, request: Request) -> None:
        """Tell the prefix cache of blocks that are full, computed and known."""
        size = self.pool.block_size
        if not self.pool.enable_prefix_caching or not request.shares:
            return
        full = min(request.num_computed, len(request.tokens)) // size
        first = request.next_register // size - 1
        if full > first:
            request.chain.extend(request.tokens)
            for index in range(first, full):
                self.pool.register(request.blocks[index], request.chain.hashes[index])
            request.next_register = (full + 1) * size

    # life of a request

    def _admissible(self, request: EngineRequest) -> Request:
        """The scheduler's form of a request. RequestError if it can never be served."""
        prompt, sampling, limits = request.prompt_token_ids, request.sampling, self.limits
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if len(prompt) >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with max_model_len {limits.max_model_len} it may have at most "
                f"{limits.max_model_len - 1}",
                param="prompt",
            )
        if min(prompt) < 0 or (limits.vocab_size and max(prompt) >= limits.vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < (limits.vocab_size or token + 1))
            raise RequestError(
                f"token id {wrong} is not in the vocabulary (0 to {limits.vocab_size - 1})", param="prompt"
            )
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {sampling.max_tokens}", param="max_tokens")
        max_length = limits.max_model_len
        if sampling.max_tokens is not None:
            max_length = min(max_length, len(prompt) + sampling.max_tokens)
        needed = self.pool.blocks_for(max_length - 1)  # the last token is never computed
        if needed > self.pool.num_blocks:
            raise RequestError(
                f"{max_length} tokens (prompt and max_tokens) need {needed} KV blocks of {self.pool.block_size} "
                f"tokens, but the whole pool has {self.pool.num_blocks}: ask for fewer tokens or give the server "
                f"more KV memory",
                param="max_tokens",
            )
        return Request(
            id=request.request_id,
            number=self._arrivals,
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_length=max_length,
            sampling=self._slot_sampling(request),
            end_tokens=frozenset(() if sampling.ignore_eos else request.eos_token_ids),
            stop_tokens=frozenset(sampling.stop_token_ids or ()),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [],
            chain=HashChain(self.pool.block_size, request.cache_salt),
        )

    def _slot_sampling(self, request: EngineRequest) -> SlotSampling:
        """What the workers need. Numbers are brought into the ranges that they keep (int32, ids of the vocabulary):
        what a client asks for must never be what breaks a step."""
        sampling, most = request.sampling, self.limits.vocab_size or 2**31 - 1

        def known(ids: Iterable[int] | None) -> tuple[int, ...]:
            return tuple(token for token in dict.fromkeys(ids or ()) if 0 <= token < most)

        def counted(logprobs: int | None) -> int:
            return -1 if logprobs is None else min(logprobs, most) if logprobs >= 0 else most

        bias = sampling.logit_bias or {}
        ends = known([*request.eos_token_ids, *(sampling.stop_token_ids or ())]) if sampling.min_tokens else ()
        return SlotSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if 0 < sampling.top_k < most else 0,
            seed=request.seed % 2**64,
            logprobs=counted(sampling.logprobs),
            prompt_logprobs=counted(sampling.prompt_logprobs),
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_ids=known(bias),
            bias_values=tuple(bias[token] for token in known(bias)),
            allowed_ids=known(sampling.allowed_token_ids),
            bad_words=tuple(tuple(word) for word in request.bad_words_ids if word and known(word[-1:])),
            min_tokens=min(sampling.min_tokens, 2**31 - 1) if ends else 0,
            end_ids=ends,
        )

    def _take(self, request: Request, index: int, token: int, logprob: TokenLogprobs | None) -> RequestOutput:
        """Append a sampled token to an unfinished request; end it where it ends."""
        assert len(request.tokens) - request.num_prompt == index, "outputs of a request come in order"
        request.tokens.append(token)
        request.pending -= 1
        output = RequestOutput(
            request_id=request.id,
            first_index=index,
            token_ids=[token],
            logprobs=[logprob] if request.sampling.logprobs >= 0 else [],
            num_cached_tokens=max(request.num_cached, 0),
        )
        if index == 0 and request.prompt_logprobs:
            output.prompt_logprobs = request.prompt_logprobs
        if token in request.end_tokens:
            output.finish_reason = "stop"
        elif token in request.stop_tokens:
            output.finish_reason, output.stop_reason = "stop", token
        elif len(request.tokens) >= request.max_length:
            output.finish_reason = "length"
        if request.slot >= 0 and len(request.tokens) >= request.next_register:
            self._register(request)
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
        """Take everything from the latest arrived running request; it will be recomputed from its tokens."""
        self._release(request)
        self._waiting.appendleft(request)
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
        # _running is in order of arrival
        del self._running[bisect_left(self._running, request.number, key=lambda other: other.number)]
        self._freed.append(request.slot)
        self._free_slots.append(request.slot)
        self.pool.free(request.blocks)
        request.slot, request.blocks, request.num_computed = -1, [], 0

    def check(self) -> None:
        """Raise AssertionError if slots, blocks or queues contradict each other (for tests; linear time)."""
        self.pool.check()
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_num_seqs)), "a slot is lost"
        order = [request.number for request in [*self._running, *self._waiting]]
        assert order == sorted(order), "somebody was overtaken"
        assert len(order) == len(self._requests), "a request is lost"
        tables = {block for request in self._running for block in request.blocks}
        assert len(tables) == self.pool.num_used, "blocks are used by nobody"
        for request in self._running:
            assert len(request.blocks) >= self.pool.blocks_for(request.num_computed), "a table is too short"
            assert request.length <= request.max_length, "a request goes too far"
