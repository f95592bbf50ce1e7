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
import dataclasses
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import msgspec

from drumline.engine.checks import check_machine, check_model
from drumline.engine.client import SyncEngineClient
from drumline.engine.protocol import EngineStats, ProcessState
from drumline.errors import FailedError, RequestError
from drumline.llm.options import eos_token_ids, make_config, tokenizer_loader
from drumline.llm.progress import Progress, ProgressBar, shown
from drumline.model.resolve import resolve
from drumline.plan.sampling import SamplingParams
from drumline.platforms import device_table
from drumline.text.chat import load_chat_template
from drumline.text.requests import PreparedRequest, Prompt, RequestBuilder, split_prompts
from drumline.text.results import OutputAssembler, RequestOutput
from drumline.text.tokenizer import Tokenizer, read_sampling_defaults

_LONG = 7 * 86400.0
"""Seconds that stand for "no limit": the engine's death ends such a wait."""


class LLM:
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
        **options: Any,
    ) -> None:
        config = make_config(
            model=os.fspath(model),
            tokenizer=None if tokenizer is None else os.fspath(tokenizer),
            skip_tokenizer_init=skip_tokenizer_init,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            seed=seed,
            max_model_len=max_model_len,
            chat_template=None if chat_template is None else os.fspath(chat_template),
            **options,
        )
        config = check_machine(config, device_table(config.platform))
        self.config = config = dataclasses.replace(config, model=resolve(config.model))
        """The whole configuration, the model's local folder included."""
        check_model(config)
        self._lock = threading.Lock()
        self._request_ids = itertools.count()
        load = tokenizer_loader(config.model)
        client = self._client = SyncEngineClient(config)
        self._finalizer = weakref.finalize(self, _end, client, os.getpid())
        try:
            # A large vocabulary takes seconds, as long as the processes take to start.
            with ThreadPoolExecutor(1, thread_name_prefix="drumline-tokenizer") as pool:
                loading = pool.submit(load)
                info = client.start()
                self._tokenizer = loading.result()
        except BaseException:
            self._finalizer()
            raise
        self._builder = RequestBuilder(
            self._tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=eos_token_ids(self._tokenizer, config.model.path),
            sampling_defaults=read_sampling_defaults(config.model.path),
            seed=config.model.seed,
        )

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
        ``use_tqdm`` shows a progress bar; a callable makes one as ``tqdm`` does. ``priority`` other than 0 is
        refused: requests are served in the order of arrival. ``tokenization_kwargs`` may have ``add_special_tokens``.

        Raises :class:`RequestError` before anything is computed if a prompt or a parameter is wrong, and
        :class:`EngineDeadError` if a process dies. ctrl-C aborts the requests; the LLM stays usable.
        """
        _refuse(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        special = _add_special_tokens(tokenization_kwargs, default=True)
        given = split_prompts(prompts)
        return self._run(self._prepare(given, sampling_params, priority, add_special_tokens=special), use_tqdm)

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
        if self._tokenizer is None:
            raise RequestError("chat needs a tokenizer, which was not loaded (skip_tokenizer_init).", param="messages")
        _refuse(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        if chat_template_content_format not in ("auto", "string"):
            raise RequestError(
                f"chat_template_content_format {chat_template_content_format!r} is not supported: contents are given "
                "to the template as text.",
                param="chat_template_content_format",
            )
        template = None if chat_template is None else load_chat_template(os.fspath(chat_template))
        texts: list[Prompt] = [
            self._tokenizer.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                **dict(chat_template_kwargs or {}),
            )
            for conversation in _conversations(messages)
        ]
        # The template has written the special tokens already.
        special = _add_special_tokens(tokenization_kwargs, default=False)
        prepared = self._prepare(texts, sampling_params, priority, add_special_tokens=special)
        return self._run(prepared, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``sampling_params=None`` means: the defaults of the model's generation_config.json."""
        return self._builder.default_params()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers, those of all data-parallel engines unless told otherwise."""
        parallel = self.config.parallel
        return parallel.world_size * (parallel.data_parallel_size if include_dp else 1)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. RuntimeError with ``skip_tokenizer_init``."""
        if self._tokenizer is None:
            raise RuntimeError("the tokenizer was not loaded (skip_tokenizer_init)")
        return self._tokenizer

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
        return [
            self._builder.prepare(
                str(next(self._request_ids)), prompt, one, add_special_tokens=add_special_tokens, priority=level
            )
            for prompt, one, level in zip(prompts, each, priorities, strict=True)
        ]

    def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        """Send everything, and take in outputs until all have ended."""
        self._check_usable()
        assemblers = [OutputAssembler(self._tokenizer, request) for request in prepared]
        owner = {
            child.request_id: assembler
            for request, assembler in zip(prepared, assemblers, strict=True)
            for child in request.children
        }
        # One call at a time: poll() gives outputs to whoever asks.
        with self._lock, shown(use_tqdm, len(prepared)) as progress:
            try:
                for request in prepared:
                    for child in request.children:
                        self._client.add(child)
                self._take_in(owner, len(prepared), progress)
            except BaseException:
                self._abort(assemblers)
                raise
        return [assembler.result() for assembler in assemblers]

    def _take_in(self, owner: Mapping[str, OutputAssembler], left: int, progress: Progress) -> None:
        while left:
            for output in self._client.poll():
                assembler = owner.get(output.request_id)  # None: of requests that were aborted
                new = None if assembler is None else assembler.push(output)
                if assembler is None or new is None:
                    continue
                progress.tokens(len(new.token_ids))
                if aborts := assembler.take_aborts():
                    self._client.abort(aborts)
                if assembler.finished:
                    left -= 1
                    progress.one_done()

    def _abort(self, assemblers: Sequence[OutputAssembler]) -> None:
        """End what still runs; whoever calls this raises already what matters."""
        running = [request_id for assembler in assemblers for request_id in assembler.running]
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
        :class:`RPCTimeoutError` after ``timeout`` seconds.
        """
        self._check_usable()
        call = cloudpickle.dumps((method, tuple(args), dict(kwargs or {})), protocol=5)
        answers = self._client.call("pickled_rpc", call, timeout=_LONG if timeout is None else timeout)
        return list(pickle.loads(answers))

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of all prompts so far, as after a change of weights. True: it cannot fail."""
        self._check_usable()
        self._client.call("reset_prefix_cache")
        return True

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
        if self._finalizer.peek()[2][1] != os.getpid():  # type: ignore[index]
            raise RuntimeError("this LLM belongs to the process that made it, and this one was forked from it")


def _refuse(**given: Any) -> None:
    """RequestError for arguments that vLLM's users know and nothing here can do."""
    for name, value in given.items():
        if value:
            raise RequestError(f"{name} is not supported.", param=name)


def _add_special_tokens(given: Mapping[str, Any] | None, *, default: bool) -> bool:
    options = dict(given or {})
    value = options.pop("add_special_tokens", default)
    if options:
        raise RequestError(
            f"tokenization_kwargs can have add_special_tokens, but not {', '.join(map(str, options))}.",
            param="tokenization_kwargs",
        )
    return bool(value)


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
