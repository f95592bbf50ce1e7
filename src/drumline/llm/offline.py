"""LLM: a model for plain programs, with the arguments and results of vLLM's class of that name.

::

    your program: LLM -> RequestBuilder -> SyncEngineClient ==> EngineCore process -> worker processes
                  LLM <- OutputAssembler <- poll()          <==

The program's process stays free of torch: it tokenises, detokenises and waits. No main guard is needed, since no
process re-runs the program. The processes end with :meth:`LLM.close`, with the ``with`` block, when the object is
collected, when the program ends, and when it is killed.

Rejected: signal handlers of our own (the program's are its own; ctrl-C arrives as KeyboardInterrupt in ``generate``,
which aborts its requests and leaves the LLM usable).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from drumline.engine.client import SyncEngineClient
from drumline.engine.protocol import EngineStats, ProcessState, Recoveries
from drumline.errors import DrumlineError, FailedError, RequestError, RequestFailedError
from drumline.llm.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, Search
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
from drumline.llm.progress import Progress, ProgressBar, shown
from drumline.plan.sampling import SamplingParams
from drumline.text.requests import PreparedRequest, Prompt, split_prompts
from drumline.text.results import OutputAssembler, RequestOutput


class _Batch:
    """Prompts that one call waits for."""

    def __init__(self, assemblers: Sequence[OutputAssembler]) -> None:
        self.assemblers = assemblers
        self.left = len(assemblers)
        self.failure: DrumlineError | None = None


class LLM(Common):
    """A model and the processes that run it.

    Args:
        model: local Hugging Face folder or hub name; empty: the embedded default model.
        tokenizer: folder or hub name of the tokenizer, if it is not the model's.
        skip_tokenizer_init: no tokenizer: prompts are token ids, results have no text.
        tensor_parallel_size: number of worker processes that share the model.
        dtype: ``auto`` (float32 on cpu, else the checkpoint's), ``float32``, ``bfloat16``, ``float16``.
        seed: requests without a seed of their own get theirs from a generator that begins with this one, so that a
            program that is run again gives the same outputs.
        max_model_len: longest prompt plus output in tokens.
        chat_template: file with, or text of, a template that replaces the model's.
        recovery: ``on``: when processes die, all are started again and the requests go on, with the outputs that they
            would have had; ``off``: calls raise EngineDeadError. Default: ``on`` until the program calls its workers
            (``collective_rpc``, ``apply_model``), since what it changes in them would be lost. ``recovery_restarts``,
            ``recovery_window_s`` and ``recovery_backoff_s`` are the limits.
        options: every other field of ``ModelConfig``, ``ParallelConfig``, ``ProcessConfig``, ``CacheConfig`` and
            ``SchedulerConfig``, such as ``gpu_memory_utilization``, ``kv_cache_memory_bytes``, ``max_num_seqs``,
            ``enable_prefix_caching``, ``distributed_executor_backend``, ``log_level``. None means the default.

    Raises:
        TypeError: an option does not exist (the message names the nearest), or an executor class is none.
        ConfigError: what was asked for cannot work; nothing was started.
        StartupError: a process did not start; all that did have been ended.

    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        recovery: str | None = None,
        **options: Any,
    ) -> None:
        self._healing, options = split_healing(options | {"recovery": recovery})
        options |= {
            "tokenizer": tokenizer,
            "skip_tokenizer_init": skip_tokenizer_init,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "seed": seed,
            "max_model_len": max_model_len,
            "chat_template": chat_template,
        }
        self.config = config = with_model(checked_config(model, options))
        """The whole configuration, the model's local folder included."""
        self._lock = threading.Lock()
        self._request_ids = itertools.count()
        self._owners: dict[str, tuple[OutputAssembler, _Batch]] = {}
        """Of every engine request that has not ended."""
        self._enqueued: list[_Batch] = []
        self._output_tokens = self._prompt_tokens = 0
        load = tokenizer_loader(config.model)
        client = self._client = self._healing.sync_client(config)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end, client, self._pid)
        try:
            # A large vocabulary takes seconds, as long as the processes take to start.
            with ThreadPoolExecutor(1, thread_name_prefix="drumline-tokenizer") as pool:
                loading = pool.submit(load)
                info = client.start()
                self._set_up(info, loading.result())
        except BaseException:
            self._finalizer()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """An LLM with the options of a mapping, an ``EngineConfig``, or a dataclass such as vLLM's ``EngineArgs``."""
        return cls(**options_of(engine_args))

    # -------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        *,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Outputs of all prompts, in their order.

        A prompt is a text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.
        ``sampling_params`` is one for all or a list with one for each prompt; None: the model's defaults.
        ``use_tqdm`` shows a progress bar; a callable makes one as ``tqdm`` does. ``priority``: one for all or a list,
        lower ones are served first; needs ``scheduling_policy="priority"``. ``tokenization_kwargs`` may have
        ``add_special_tokens``.

        Raises :class:`RequestError` before anything is computed if a prompt or a parameter is wrong, and
        :class:`EngineDeadError` if a process dies for good. A request that alone cannot be computed (engines die of it,
        there is no memory for it) ends with finish_reason ``error`` and an ``error`` in its result; the others are not
        affected. ctrl-C aborts the requests; the LLM stays usable.
        """
        return self._run(
            self._text_requests(
                prompts, sampling_params, priority, lora_request, tokenization_kwargs, mm_processor_kwargs
            ),
            use_tqdm,
        )

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | ProgressBar = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[str]:
        """Like :meth:`generate`, but returns the requests' ids at once; then call :meth:`wait_for_completion`."""
        return self._enqueue(
            self._text_requests(
                prompts, sampling_params, priority, lora_request, tokenization_kwargs, mm_processor_kwargs
            )
        )

    def wait_for_completion(
        self, output_type: type[Any] | tuple[type[Any], ...] | None = None, *, use_tqdm: bool | ProgressBar = True
    ) -> list[RequestOutput]:
        """Outputs of all that was enqueued, in that order. ``output_type``: must be RequestOutput, if given."""
        if output_type is not None and output_type is not RequestOutput and output_type != (RequestOutput,):
            raise TypeError(f"all outputs are RequestOutput, so output_type cannot be {output_type!r}")
        self._check_usable()
        batches, self._enqueued = self._enqueued, []
        return self._wait(batches, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation (a list of messages) or to several (a list of such lists).

        ``chat_template`` is a file or a text and replaces the model's; ``chat_template_kwargs`` are variables of the
        template, such as ``enable_thinking``. ``continue_final_message`` goes on with the last message and needs
        ``add_generation_prompt=False``. The rest as in :meth:`generate`.
        """
        return self._run(
            self._chat_requests(
                messages,
                sampling_params,
                priority,
                lora_request,
                tokenization_kwargs,
                mm_processor_kwargs,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            ),
            use_tqdm,
        )

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | ProgressBar = True,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[str]:
        """Like :meth:`chat`, but returns the requests' ids at once; then call :meth:`wait_for_completion`."""
        return self._enqueue(
            self._chat_requests(
                messages,
                sampling_params,
                priority,
                lora_request,
                tokenization_kwargs,
                mm_processor_kwargs,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | ProgressBar = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` most likely outputs of each prompt, by beam search.

        ``concurrency_limit``: prompts that are searched at once; None: all. The width is at most 10.
        """
        refuse(lora_request=lora_request)
        most = self._builder.max_logprobs // 2
        if params.beam_width > most:
            raise RequestError(f"beam_width must be at most {most}, got {params.beam_width}.", param="beam_width")
        eos, limit = self._builder.eos_token_ids, self._builder.max_model_len
        prepared = self._prepare(split_prompts(prompts), SamplingParams(max_tokens=1), None)
        searches = [Search(one.prompt_token_ids, params, eos, limit - len(one.prompt_token_ids)) for one in prepared]
        step = concurrency_limit or max(len(searches), 1)
        with shown(use_tqdm, len(searches), "Beam search") as progress:
            for start in range(0, len(searches), step):
                self._search(searches[start : start + step], params.beam_width, progress)
        return [BeamSearchOutput(self._named(search, params.skip_special_tokens)) for search in searches]

    def _search(self, searches: Sequence[Search], width: int, progress: Progress) -> None:
        """Run these searches to their ends, a token of all beams at a time."""
        ask = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True, detokenize=False)
        live = [search for search in searches if not search.over]
        while live:
            outputs = iter(self.generate([beam.tokens for one in live for beam in one.live], ask, use_tqdm=False))
            for search in live:
                found = list(itertools.islice(outputs, len(search.live)))
                if error := next((output.error for output in found if output.error is not None), None):
                    raise error
                rows = [output.outputs[0].logprobs for output in found]
                search.take([dict(row[0]) if row else {} for row in rows])
                progress.tokens(len(search.live))
                if search.over:
                    progress.one_done()
            live = [search for search in live if not search.over]

    def _named(self, search: Search, skip_special_tokens: bool) -> list[BeamSearchSequence]:
        best = search.best()
        for beam in best:
            if self._tokenizer is not None:
                beam.text = self._tokenizer.decode(beam.tokens[search.prompt_length :], skip_special_tokens)
        return best

    # ----------------------------------------------------------------------------------------------------- requests

    def _text_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        lora_request: None,
        tokenization_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: None,
    ) -> list[PreparedRequest]:
        refuse(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        special = add_special_tokens(tokenization_kwargs, default=True)
        return self._prepare(split_prompts(prompts), params, priority, add_special_tokens=special)

    def _chat_requests(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        lora_request: None,
        tokenization_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: None,
        **template: Any,
    ) -> list[PreparedRequest]:
        refuse(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        # The template has written the special tokens already.
        special = add_special_tokens(tokenization_kwargs, default=False)
        texts = self._render(_conversations(messages), **template)
        return self._prepare(texts, params, priority, add_special_tokens=special)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        *,
        add_special_tokens: bool = True,
    ) -> list[PreparedRequest]:
        each = _one_for_each("sampling_params", params, len(prompts), SamplingParams)
        priorities = _one_for_each("priority", 0 if priority is None else priority, len(prompts), int)
        for level in priorities:
            self._check_priority(level)
        return [
            self._builder.prepare(
                str(next(self._request_ids)), prompt, one, add_special_tokens=add_special_tokens, priority=level
            )
            for prompt, one, level in zip(prompts, each, priorities, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------------ running

    def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        self._check_usable()
        # One call at a time: poll() gives outputs to whoever asks.
        with self._lock:
            batch = self._batch(prepared)
            try:
                self._send(prepared)
                return self._wait_locked([batch], use_tqdm)
            except BaseException:
                self._drop([batch])
                raise

    def _enqueue(self, prepared: Sequence[PreparedRequest]) -> list[str]:
        self._check_usable()
        self._enqueued.append(self._batch(prepared))
        self._send(prepared)
        return [request.request_id for request in prepared]

    def _batch(self, prepared: Sequence[PreparedRequest]) -> _Batch:
        batch = _Batch([OutputAssembler(self._tokenizer, request) for request in prepared])
        for request, assembler in zip(prepared, batch.assemblers, strict=True):
            self._prompt_tokens += len(request.prompt_token_ids)
            for child in request.children:
                self._owners[child.request_id] = assembler, batch
        return batch

    def _send(self, prepared: Sequence[PreparedRequest]) -> None:
        for request in prepared:
            for child in request.children:
                self._client.add(child)

    def _wait(self, batches: Sequence[_Batch], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        with self._lock:
            try:
                return self._wait_locked(batches, use_tqdm)
            except BaseException:
                self._drop(batches)
                raise

    def _wait_locked(self, batches: Sequence[_Batch], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        """Take in outputs until all of these have ended."""
        with shown(use_tqdm, sum(len(batch.assemblers) for batch in batches)) as progress:
            for _ in range(sum(len(batch.assemblers) - batch.left for batch in batches)):
                progress.one_done()
            for batch in batches:
                while batch.left:
                    self._take_in(batches, progress)
                if batch.failure is not None:
                    raise batch.failure
        return [assembler.result() for batch in batches for assembler in batch.assemblers]

    def _take_in(self, batches: Sequence[_Batch], progress: Progress) -> None:
        for output in self._client.poll():
            owner = self._owners.get(output.request_id)
            if owner is None:  # of requests that were aborted
                continue
            assembler, batch = owner
            if output.finish_reason is not None:
                del self._owners[output.request_id]
            try:
                new = assembler.push(output)
            except RequestFailedError as error:
                assembler.fail(error)
                new = None
            except DrumlineError as error:
                batch.failure, batch.left = error, 0
                self._drop([batch])
                continue
            if new is None and not assembler.failed:
                continue
            if new is not None:
                self._output_tokens += len(new.token_ids)
                progress.tokens(len(new.token_ids))
            if aborts := assembler.take_aborts():
                for name in aborts:
                    self._owners.pop(name, None)
                self._client.abort(aborts)
            if assembler.finished:
                batch.left -= 1
                if batch in batches:
                    progress.one_done()

    def _drop(self, batches: Iterable[_Batch]) -> None:
        """End what still runs; whoever calls this raises already what matters."""
        running = [name for batch in batches for assembler in batch.assemblers for name in assembler.running]
        for name in running:
            self._owners.pop(name, None)
        with contextlib.suppress(Exception):
            self._client.abort(running)

    # --------------------------------------------------------------------------------------------------- the rest

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, or a function with the worker as its first argument; answers in rank order.

        ``worker_extension_cls`` adds methods of your own. Functions, arguments and answers travel pickled, over the
        sockets that only processes of this LLM know. Raises :class:`RemoteCallError` if a worker raises,
        :class:`RPCTimeoutError` after ``timeout`` seconds. From then on a death of the engine is final, unless
        ``recovery="on"`` was given: what the call changed in the workers would be lost.
        """
        self._check_usable()
        limit = NO_LIMIT_S if timeout is None else timeout
        call = pickled_call(method, args, kwargs)
        self._healing.called(self._client)
        return list(pickle.loads(self._client.call("pickled_rpc", call, limit, timeout=limit)))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model (torch's module) of every worker; answers in rank order.

        Only with ``model_impl="transformers"``: else the modules have no weights (RemoteCallError says so). Each worker
        has its own part of the weights. Answers travel pickled: give back numbers, not parameters.
        """
        return self.collective_rpc("apply_model", args=(func,))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the KV of all prompts so far, as after a change of weights. True: it cannot fail.

        What still runs keeps its own KV: ``reset_running_requests`` is refused.
        """
        refuse(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        self._check_usable()
        self._client.call("reset_prefix_cache")
        return True

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges under the names that vLLM gives them (``vllm:num_requests_running`` ...)."""
        name = (self.config.model.served_model_name or (self.config.model.model or self.config.model.path,))[0]
        stats, recoveries = self.stats(), self.recoveries
        return engine_metrics(
            stats, name, prompt_tokens=self._prompt_tokens, output_tokens=self._output_tokens, recoveries=recoveries
        )

    @property
    def recoveries(self) -> Recoveries | None:
        """Restarts of dead engines so far, by cause, with their pauses; None with ``recovery="off"``."""
        return self._client.recoveries

    def stats(self) -> EngineStats:
        """State of the scheduler: running and waiting requests, KV blocks, prefix hits ...

        While another thread generates, or once the engine has ended, as it was last told.
        """
        # Only one thread at a time may take in what the engine says.
        if not self._finalizer.alive or self._client.failure is not None or not self._lock.acquire(blocking=False):
            return self._client.stats()
        try:
            self._check_usable()
            return msgspec.convert(self._client.call("stats"), EngineStats)
        except FailedError:
            return self._client.stats()
        finally:
            self._lock.release()

    def processes(self) -> list[ProcessState]:
        """All processes of this LLM, the program's own first."""
        return list(self._client.processes())

    def close(self) -> None:
        """End all processes. Idempotent; an LLM that is closed cannot be used any more."""
        self._finalizer()

    shutdown = close

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        name = self.config.model.model or self.config.model.path
        return f"LLM({name!r}, tensor_parallel_size={self.config.parallel.tensor_parallel_size}{state})"

    def _check_usable(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed")
        self._check_process()


def _end(client: SyncEngineClient, pid: int) -> None:
    if os.getpid() == pid:  # a forked child of the program must not end the program's processes
        client.shutdown()


def _conversations(messages: Any) -> list[Any]:
    """One conversation or several, as several."""
    if isinstance(messages, list | tuple) and messages and all(isinstance(item, list | tuple) for item in messages):
        return list(messages)
    return [messages]


def _one_for_each(name: str, value: Any, count: int, kind: type[Any]) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or not all(isinstance(item, kind) for item in value):
        raise RequestError(f"{name} must be one {kind.__name__}, or a list with one for each prompt.", param=name)
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts.", param=name)
    return list(value)
