"""What users get back: results shaped as vLLM's, and the assembler that makes them of the engine's outputs.

``best_of`` (which vLLM has given up) is done here: all children run, and the result has the ``n`` of them whose tokens
have the highest mean log-probability, best first; equals in the order of their indices. It is known only at the end, so
it cannot be streamed: whoever calls :meth:`OutputAssembler.push` gets children, not outputs, then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from drumline.engine.protocol import RequestOutput as EngineOutput
from drumline.errors import DrumlineError, RequestFailedError
from drumline.plan.step import TokenLogprobs
from drumline.text.detokenize import Detokenizer
from drumline.text.requests import PreparedRequest
from drumline.text.tokenizer import Tokenizer


@dataclass
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """Place in the vocabulary, 1 the most likely."""
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One output of a request."""

    index: int
    text: str
    token_ids: list[int]
    """Output tokens, the one that ended it (end of sequence, stop token) included."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the output's tokens, if they were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each output token: the sampled token and the most likely ones."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort``, ``error`` (see ``RequestOutput.error``), or None while it goes on."""
    stop_reason: int | str | None = None
    """Stop text or stop token that ended it; None for the end-of-sequence token; ``bad_words`` where bad words left no
    token to choose."""
    lora_request: None = None

    def finished(self) -> bool:
        """It has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All outputs of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt: itself and the most likely ones; None for the first, which nothing is before."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    error: RequestFailedError | None = None
    """Why this prompt alone could not be computed; its outputs have what came before."""
    metrics: None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None


@dataclass
class _Child:
    """State of one output."""

    index: int
    detokenizer: Detokenizer | None = None
    received: int = 0
    """Tokens that the engine has sent, those after a stop string included."""
    output: CompletionOutput = field(init=False)
    cached: int = 0

    @property
    def mean_logprob(self) -> float:
        """Of the output's tokens, for ``best_of``."""
        return (self.output.cumulative_logprob or 0.0) / max(len(self.output.token_ids), 1)

    def __post_init__(self) -> None:
        self.output = CompletionOutput(index=self.index, text="", token_ids=[])


class OutputAssembler:
    """Turns engine outputs of one prompt's children into results.

    Feed it with :meth:`push`; each call gives what is new. When a stop string ends a child, its id is in
    :meth:`take_aborts`: tell the engine, which does not know of stop strings. :meth:`result` is the whole so far.
    """

    def __init__(self, tokenizer: Tokenizer | None, prepared: PreparedRequest) -> None:
        self._tokenizer = tokenizer
        self._prepared = prepared
        params = prepared.params
        self._children = {child.request_id: _Child(index) for index, child in enumerate(prepared.children)}
        self._wants_logprobs = params.logprobs is not None or len(self._children) > params.n
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        for child in self._children.values():
            if self._wants_logprobs:
                child.output.logprobs, child.output.cumulative_logprob = [], 0.0
        self._aborts: list[str] = []
        self._error: RequestFailedError | None = None

    def get_ready(self) -> None:
        """Do now what the first :meth:`push` of each child would do else: to be called once the engine is at work."""
        for child in self._children.values():
            self._detokenizer(child)

    def _detokenizer(self, child: _Child) -> Detokenizer:
        if child.detokenizer is None:
            prepared = self._prepared
            eos = prepared.children[child.index].eos_token_ids
            child.detokenizer = Detokenizer(self._tokenizer, prepared.prompt_token_ids, prepared.params, eos)
        return child.detokenizer

    @property
    def finished(self) -> bool:
        """Every output has ended."""
        return all(child.output.finished() for child in self._children.values())

    @property
    def running(self) -> list[str]:
        """Ids of the engine requests that have not ended."""
        return [name for name, child in self._children.items() if not child.output.finished()]

    def take_aborts(self) -> list[str]:
        """Ids of engine requests that ended here by a stop string since the last call."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def push(self, new: EngineOutput) -> CompletionOutput | None:
        """What is new in the child that ``new`` belongs to; None if it has ended already or nothing is new.

        Raises :class:`RequestFailedError` if the request could not be computed, DrumlineError if it was refused.
        """
        child = self._children[new.request_id]
        if child.output.finished():
            return None
        if new.finish_reason == "error":
            said = f"Request {self._prepared.request_id} failed: {new.message or 'no reason given'}"
            if new.stop_reason is not None:
                raise RequestFailedError(said, reason=new.stop_reason)
            raise DrumlineError(said)
        # After a recovery the engine may say again what is known already; it never leaves tokens out.
        known = child.received - new.first_index
        if known < 0:
            raise DrumlineError(f"Request {new.request_id}: tokens {child.received} to {new.first_index} are missing")
        tokens, logprobs = new.token_ids[known:], new.logprobs[known:]
        child.received += len(tokens)
        child.cached = child.cached or new.num_cached_tokens
        if not tokens and new.finish_reason is None:
            return None
        if child.index == 0 and tokens:
            self._take_prompt_logprobs(new.prompt_logprobs)
        detokenizer = self._detokenizer(child)
        text, stop = detokenizer.push(tokens)
        tokens = tokens[: detokenizer.consumed]
        delta = CompletionOutput(index=child.index, text=text, token_ids=list(tokens))
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
            if new.finish_reason is None:
                self._aborts.append(new.request_id)
        elif new.finish_reason is not None:
            delta.text += detokenizer.finish()
            delta.finish_reason, delta.stop_reason = new.finish_reason, new.stop_reason
        if self._wants_logprobs:
            delta.logprobs = self._logprobs(tokens, logprobs)
            delta.cumulative_logprob = sum(row.logprob for row in logprobs[: len(tokens)] if row is not None)
        _merge(child.output, delta)
        return delta

    def fail(self, error: RequestFailedError) -> None:
        """End all outputs that have not ended, as failed."""
        self._error = error
        for name, child in self._children.items():
            if not child.output.finished():
                child.output.finish_reason, child.output.stop_reason = "error", error.reason
                self._aborts.append(name)

    @property
    def failed(self) -> bool:
        """:meth:`fail` was called."""
        return self._error is not None

    def result(self) -> RequestOutput:
        """All outputs so far."""
        cached = [child.cached for child in self._children.values()]
        return RequestOutput(
            request_id=self._prepared.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=self._prepared.prompt_token_ids,
            outputs=self._outputs(),
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=cached[0] if cached else 0,
            error=self._error,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all children so far, those that ``best_of`` leaves out included."""
        return sum(len(child.output.token_ids) for child in self._children.values())

    def _outputs(self) -> list[CompletionOutput]:
        """The outputs, chosen among the children."""
        params = self._prepared.params
        children = list(self._children.values())
        if len(children) <= params.n:
            return [child.output for child in children]
        best = sorted(children, key=lambda child: -child.mean_logprob)[: params.n]
        hidden = {} if params.logprobs is not None else {"logprobs": None, "cumulative_logprob": None}
        return [replace(child.output, index=index, **hidden) for index, child in enumerate(best)]  # type: ignore[arg-type]

    def _take_prompt_logprobs(self, rows: Sequence[TokenLogprobs]) -> None:
        if self._prepared.params.prompt_logprobs is None or self._prompt_logprobs is not None:
            return
        tokens = self._prepared.prompt_token_ids[1:]
        self._prompt_logprobs = [
            None,
            *(token_logprobs(self._tokenizer, token, row) for token, row in zip(tokens, rows, strict=True)),
        ]

    def _logprobs(self, tokens: Sequence[int], rows: Sequence[TokenLogprobs | None]) -> list[dict[int, Logprob]]:
        return [
            token_logprobs(self._tokenizer, token, row) if row is not None else {}
            for token, row in zip(tokens, rows, strict=False)
        ]


def token_logprobs(tokenizer: Tokenizer | None, token: int, row: TokenLogprobs) -> dict[int, Logprob]:
    """The sampled token and the most likely ones at one position, by token id."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    found = {token: Logprob(row.logprob, row.rank, text(token))}
    for rank, (other, value) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
        found.setdefault(other, Logprob(value, rank, text(other)))
    return found


def _merge(whole: CompletionOutput, delta: CompletionOutput) -> None:
    whole.text += delta.text
    whole.token_ids += delta.token_ids
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    if delta.logprobs is not None and whole.logprobs is not None:
        whole.logprobs += delta.logprobs
        whole.cumulative_logprob = (whole.cumulative_logprob or 0.0) + (delta.cumulative_logprob or 0.0)
