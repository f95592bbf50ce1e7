"""AsyncLLM: a model for programs that run an asyncio loop: servers, notebooks, RL loops.

::

    your tasks: generate() -> RequestBuilder -> AsyncEngineClient ==> EngineCore process -> worker processes
                 _Stream   <- OutputAssembler <- on_output()      <==

An AsyncLLM belongs to the loop that starts it, and everything is called there. What the engine gives is assembled as
it comes, and a task is woken once however much has come, so a slow reader gets more at once and holds up nobody.

The processes end with ``async with``, with :meth:`AsyncLLM.shutdown`, when the object is collected, when the program
ends, and when it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import itertools
import os
import pickle
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from drumline.config import EngineConfig
from drumline.engine.client import AsyncEngineClient
from drumline.engine.protocol import EngineStats, OutputHandle, ProcessState, Recoveries
from drumline.engine.protocol import RequestOutput as EngineOutput
from drumline.errors import DrumlineError, EngineDeadError, FailureReport, RequestError, is_unicode, shown
from drumline.llm.common import (
    NO_LIMIT_S,
    Common,
    add_special_tokens,
    checked_config,
    pickled_call,
    refuse,
    split_healing,
    with_model,
)
from drumline.llm.metrics import Metric, engine_metrics
from drumline.llm.options import options_of, tokenizer_loader
from drumline.plan.sampling import RequestOutputKind, SamplingParams
from drumline.text.requests import PreparedRequest, Prompt
from drumline.text.results import CompletionOutput, OutputAssembler, RequestOutput
from drumline.text.tokenizer import SHORT_CHARS

INLINE_CHARS = SHORT_CHARS
"""Texts up to this length are tokenised on the loop, longer ones in a thread."""
AT_ONCE = 64
"""Tokens that are taken together where only the end is wanted."""


class AsyncLLM(Common):
    """A model and the processes that run it, for one asyncio loop.

    ::

        async with AsyncLLM("path/to/model") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Arguments as for :class:`~drumline.llm.offline.LLM`. Making one checks the options and starts nothing;
    ``async with``, :meth:`start` or the first request starts the processes.

    Raises:
        TypeError: an option does not exist (the message names the nearest), or an executor class is none.
        ConfigError: what was asked for cannot work.

    """

    def __init__(self, model: str | os.PathLike[str] = "", **options: Any) -> None:
        self._healing, options = split_healing(options)
        self.config: EngineConfig = checked_config(model, options)
        """The whole configuration; once started, with the model's local folder."""
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._client: AsyncEngineClient | None = None
        self._holder: list[AsyncEngineClient] = []
        self._finalizer = weakref.finalize(self, _end, self._holder, self._pid)
        self._request_ids = itertools.count()
        self._engine_ids = itertools.count()
        self._streams: dict[str, _Stream | None] = {}
        """By request id; None while the prompt is tokenised."""
        self._aborted: set[str] = set()
        """Of those that are None."""
        self._output_tokens = self._prompt_tokens = 0

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> AsyncLLM:
        """One with the options of a mapping, an ``EngineConfig``, or a dataclass such as vLLM's ``AsyncEngineArgs``."""
        return cls(**options_of(engine_args))

    # --------------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the processes and wait until they are ready. Later calls do nothing.

        ConfigError if the model cannot be run, StartupError if a process does not start; all have been ended then.
        """
        self._check_usable()
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = self._loop.create_task(self._start())
        # Whoever waits may be cancelled; others may wait too.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            self.config = config = await asyncio.to_thread(with_model, self.config)
            client = self._healing.async_client(config, "AsyncLLM")
            self._holder.append(client)
            # A large vocabulary takes seconds, as long as the processes take to start.
            load = tokenizer_loader(config.model)
            self._set_up(*await asyncio.gather(client.start(), asyncio.to_thread(load)))
            self._check_usable()
            self._client = client
        except BaseException:
            await asyncio.to_thread(self._finalizer)
            raise

    async def aclose(self) -> None:
        """End all processes; requests that run raise EngineDeadError. Idempotent."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._starting
        await asyncio.to_thread(self._finalizer)

    def shutdown(self, timeout: float | None = None) -> None:
        """The same for callers that cannot wait on a loop: blocks, for a second at most. Any thread.

        ``timeout`` is what vLLM's users give, and has no effect.
        """
        self._finalizer()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Results of one prompt as they come; the last one has ``finished``.

        Each result has all outputs so far; with ``SamplingParams(output_kind=RequestOutputKind.DELTA)`` what is new
        in those outputs that have something new; with ``FINAL_ONLY`` there is one result. A reader that is slower than
        the model gets several tokens at once. Leaving the loop or cancelling the task aborts the request; after
        :meth:`abort` the last result has finish_reason ``abort``.

        ``request_id`` is the caller's name for it, and must not be in use; without one it gets a number. ``priority``:
        lower ones are served first, with ``scheduling_policy="priority"``. ``tokenization_kwargs`` may have
        ``add_special_tokens``.

        Raises :class:`RequestError` if prompt or parameters are wrong, :class:`EngineDeadError` with the root cause
        if a process dies for good, and :class:`RequestFailedError` if this request alone cannot be computed.
        """
        refuse(lora_request=lora_request, trace_headers=trace_headers, data_parallel_rank=data_parallel_rank)
        special = add_special_tokens(tokenization_kwargs, default=True)
        return self._run(lambda: prompt, _chars(prompt), sampling_params, request_id, priority, special)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: None = None,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers to one conversation, as :meth:`generate` gives them. The other arguments: ``LLM.chat``."""
        refuse(lora_request=lora_request)
        special = add_special_tokens(tokenization_kwargs, default=False)

        def render() -> Prompt:
            return self._render(
                [messages],
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )[0]

        # A template is somebody's program: it runs in a thread, however short the messages are.
        return self._run(render, INLINE_CHARS + 1, sampling_params, request_id, priority, special)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests; their iterators end with finish_reason ``abort``. Ids that do not run are ignored."""
        client = await self._ready()
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._aborted.update(name for name in names if self._streams.get(name, ...) is None)
        streams = [stream for name in names if (stream := self._streams.get(name)) is not None]
        await client.abort([child for stream in streams for child in stream.running])

    async def _run(
        self,
        prompt: Callable[[], Prompt],
        chars: int,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        special: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        client = await self._ready()
        name = self._free_id() if request_id is None else request_id
        if not isinstance(name, str):
            raise RequestError(f"request_id must be a text, got {name!r}.", param="request_id")
        if not is_unicode(name):
            raise RequestError(f"request_id has a lone surrogate in it: {shown(name)}.", param="request_id")
        if name in self._streams:
            raise RequestError(f"Request id {name!r} is in use.", param="request_id")
        self._check_priority(priority)

        # The engine may still say something of a request that was dropped, when its name is in use again.
        engine_id = f"{next(self._engine_ids)}-{name}"

        def prepare() -> PreparedRequest:
            made = self._builder.prepare(engine_id, prompt(), params, add_special_tokens=special, priority=priority)
            return dataclasses.replace(made, request_id=name)

        self._streams[name] = stream = None
        try:
            prepared = prepare() if chars <= INLINE_CHARS else await asyncio.to_thread(prepare)
            self._prompt_tokens += len(prepared.prompt_token_ids)
            stream = self._streams[name] = _Stream(client, self._tokenizer, prepared)
            stream.open()
            if name in self._aborted:
                await client.abort(stream.running)
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[name]
            self._aborted.discard(name)
            if stream is not None:
                self._output_tokens += stream.tokens
                stream.close()

    def _free_id(self) -> str:
        return next(name for name in map(str, self._request_ids) if name not in self._streams)

    # ----------------------------------------------------------------------------------------------------- the rest

    @property
    def is_running(self) -> bool:
        """Ready for requests: started, and neither dead nor closed."""
        return self._client is not None and self._finalizer.alive and self._client.failure is None

    @property
    def is_stopped(self) -> bool:
        """Dead or closed."""
        return self.errored or not self._finalizer.alive

    @property
    def errored(self) -> bool:
        """A process has died; every request raises EngineDeadError."""
        return any(client.failure is not None for client in self._holder)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What every request raises once the engine is dead, with the root cause; None while it is not."""
        failures = [client.failure for client in self._holder if client.failure is not None]
        return EngineDeadError(failures[0]) if failures else None

    async def check_health(self) -> None:
        """EngineDeadError if the engine is dead; else asks it, which tells that it answers."""
        await (await self._ready()).call("ping")

    async def wait_dead(self) -> FailureReport:
        """Wait until the engine dies; its root cause."""
        self._check_loop()
        client = self._client or await self._ready()
        return await client.wait_dead()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._tokenizer

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ASYNC109
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, or a function with the worker as its first argument; see ``LLM``."""
        client = await self._ready()
        limit = NO_LIMIT_S if timeout is None else timeout
        call = pickled_call(method, args, kwargs)
        self._healing.called(client)
        return list(pickle.loads(await client.call("pickled_rpc", call, limit, timeout=limit)))

    async def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model (torch's module) of every worker; answers in rank order."""
        return await self.collective_rpc("apply_model", args=(func,))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the KV of all prompts so far; what runs keeps its own. See ``LLM``."""
        refuse(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        await (await self._ready()).call("reset_prefix_cache")
        return True

    async def stats(self) -> EngineStats:
        """State of the scheduler."""
        return msgspec.convert(await (await self._ready()).call("stats"), EngineStats)

    async def get_metrics(self) -> list[Metric]:
        """Counters and gauges under the names that vLLM gives them (``vllm:num_requests_running`` ...)."""
        tokens = self._output_tokens + sum(stream.tokens for stream in self._streams.values() if stream is not None)
        name = (self.config.model.served_model_name or (self.config.model.model or self.config.model.path,))[0]
        return engine_metrics(
            await self.stats(),
            name,
            prompt_tokens=self._prompt_tokens,
            output_tokens=tokens,
            recoveries=self.recoveries,
        )

    @property
    def recoveries(self) -> Recoveries | None:
        """Restarts of dead engines so far, by cause, with their pauses; None with ``recovery="off"``, and before the
        start."""
        return self._client.recoveries if self._client is not None else None

    def get_num_unfinished_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._streams)

    def processes(self) -> list[ProcessState]:
        """All processes, the program's own first. Useful during the start too."""
        return [process for client in self._holder for process in client.processes()]

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``sampling_params=None`` means: the defaults of the model's generation_config.json."""
        self._check_started()
        return super().get_default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The tokenizer. RuntimeError before the start, or with ``skip_tokenizer_init``."""
        self._check_started()
        return super().get_tokenizer()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "dead" if self.errored else "closed" if self.is_stopped else "new"
        name = self.config.model.model or self.config.model.path
        size = self.config.parallel.tensor_parallel_size
        return f"AsyncLLM({name!r}, tensor_parallel_size={size}, {state})"

    async def _ready(self) -> AsyncEngineClient:
        self._check_usable()
        if self._client is None:
            await self.start()
            assert self._client is not None
        return self._client

    def _check_started(self) -> None:
        if self._client is None:
            raise RuntimeError("this AsyncLLM is not started: use it as `async with AsyncLLM(...)`, or await start()")

    def _check_usable(self) -> None:
        self._check_loop()
        if (error := self.dead_error) is not None:
            raise error
        if not self._finalizer.alive:
            raise RuntimeError("this AsyncLLM is closed")

    def _check_loop(self) -> None:
        self._check_process()
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            ended = ", which has ended" if self._loop.is_closed() else ""
            raise RuntimeError(
                f"this AsyncLLM belongs to the event loop that started it{ended}. Use it from that loop only (from "
                "other threads by asyncio.run_coroutine_threadsafe), or make one for each loop; each call of "
                "asyncio.run makes a new loop."
            )


class _Stream:
    """One request: assembles what its children give, and hands it to one reader."""

    def __init__(self, client: AsyncEngineClient, tokenizer: Any, prepared: PreparedRequest) -> None:
        self.tokens = 0
        """Output tokens so far."""
        self._client = client
        self._prepared = prepared
        self._assembler = OutputAssembler(tokenizer, prepared)
        # best_of chooses at the end.
        chosen = len(prepared.children) > prepared.params.n
        self._kind = RequestOutputKind.FINAL_ONLY if chosen else prepared.params.output_kind
        # Where only the end is wanted and no text can end it, tokens wait in the client till there are some.
        self._at_once = AT_ONCE if self._kind is RequestOutputKind.FINAL_ONLY and not prepared.params.stop else 1
        self._handles: dict[str, OutputHandle] = {}
        self._given: dict[int, tuple[int, int]] = {}
        """Characters and tokens of each output that the reader has had."""
        self._event = asyncio.Event()
        self._error: DrumlineError | None = None

    @property
    def running(self) -> list[str]:
        """Ids of engine requests that have not ended."""
        return self._assembler.running

    def open(self) -> None:
        """Send the requests."""
        for child in self._prepared.children:
            take = partial(self._on_output, child.request_id)
            self._handles[child.request_id] = self._client.open(child, take, self._on_dead)

    def close(self) -> None:
        """The reader wants no more."""
        for handle in self._handles.values():
            handle.close()

    async def next(self) -> RequestOutput:
        """What is there, as soon as something is. EngineDeadError; DrumlineError if the engine fails on it."""
        while True:
            await self._event.wait()
            self._event.clear()
            if self._error is not None:
                raise self._error
            if self._assembler.finished or self._kind is not RequestOutputKind.FINAL_ONLY:
                return self._result()

    def _result(self) -> RequestOutput:
        whole = self._assembler.result()
        if whole.finished and self._kind is not RequestOutputKind.DELTA:
            return whole
        if self._kind is RequestOutputKind.DELTA:
            return dataclasses.replace(whole, outputs=[new for one in whole.outputs if (new := self._delta(one))])
        return dataclasses.replace(whole, outputs=[_copy(output, 0, 0) for output in whole.outputs])

    def _delta(self, output: CompletionOutput) -> CompletionOutput | None:
        chars, tokens = self._given.get(output.index, (0, 0))
        if chars < 0 or (len(output.token_ids) == tokens and len(output.text) == chars and not output.finished()):
            return None
        new = _copy(output, chars, tokens)
        self._given[output.index] = (-1, 0) if output.finished() else (len(output.text), len(output.token_ids))
        return new

    def _on_output(self, name: str, output: EngineOutput) -> bool:
        if len(output.token_ids) < self._at_once and output.finish_reason is None:
            return False
        try:
            new = self._assembler.push(output)
        except DrumlineError as error:
            self._error = error
            self._event.set()
            return True
        if new is not None:
            self.tokens += len(new.token_ids)
            for ended in self._assembler.take_aborts():
                self._handles[ended].close()
            if self._kind is not RequestOutputKind.FINAL_ONLY or self._assembler.finished:
                self._event.set()
        return True

    def _on_dead(self) -> None:
        failure = self._client.failure or FailureReport(role="AsyncLLM", pid=os.getpid(), what="was shut down")
        self._error = EngineDeadError(failure)
        self._event.set()


def _copy(output: CompletionOutput, chars: int, tokens: int) -> CompletionOutput:
    """What is in an output behind its first characters and tokens, as it is now."""
    new = copy.copy(output)
    new.text = output.text[chars:]
    new.token_ids = output.token_ids[tokens:]
    if output.logprobs is not None:
        new.logprobs = output.logprobs[tokens:]
    return new


def _chars(prompt: Prompt) -> int:
    """Characters to be tokenised."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0


def _end(holder: list[AsyncEngineClient], pid: int) -> None:
    if os.getpid() == pid:  # a forked child of the program must not end the program's processes
        for client in holder:
            client.shutdown_now()
