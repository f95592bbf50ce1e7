"""``drumline bench serve``: load against any server of the OpenAI API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from drumline.cli.args import parse
from drumline.cli.bench import report
from drumline.cli.bench.answers import SHORT, printable, refusal
from drumline.cli.bench.connection import AddressError, Client, Exchange
from drumline.cli.bench.flags import PATHS, parser
from drumline.cli.bench.load import Job, Run, read, run_load
from drumline.cli.bench.prompts import Lengths, Prompt, ordinary_ids, random_ids, random_texts, read_prompts
from drumline.cli.bench.schedule import arrivals
from drumline.cli.bench.stats import Outcome, summarise
from drumline.errors import ConfigError, ExitCode
from drumline.text.tokenizer import Tokenizer


class RefusedError(Exception):
    """No server, or it takes no such request. The message is for the user."""


def main(argv: Sequence[str]) -> int:
    """Run ``drumline bench serve``."""
    options = parse(parser(), argv)
    try:
        run = Bench(options)
        return _run_loop(run)
    except (RefusedError, AddressError) as e:
        print(f"drumline bench serve: {e}", file=sys.stderr)
        return ExitCode.FAILED


# ------------------------------------------------------------------------------------------------------------------ run


@dataclass(frozen=True, slots=True)
class Form:
    """How requests are written."""

    ids: bool
    usage: bool


class Bench:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.chat = options.endpoint in ("chat", PATHS["chat"])
        self.path = PATHS["chat" if self.chat else "completions"]
        self.url = self._url()
        if self.chat and options.prompts_as == "ids":
            raise ConfigError("--prompts-as ids works with --endpoint completions only.")
        if options.dataset_name not in (None, "random") and options.dataset_path is None:
            raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path.")
        try:
            self.percentiles = report.percentiles(options.metric_percentiles)
        except ValueError as e:
            raise ConfigError(f"--metric-percentiles {options.metric_percentiles}: {e}.") from None
        output = options.output_len or options.random_output_len
        self.lengths = Lengths(
            options.random_input_len, output, options.random_range_ratio, prefix=options.random_prefix_len
        )
        self._tokenizer: Tokenizer | None = None
        self._run: Run | None = None
        self._form = Form(ids=False, usage=False)
        self._count = 0
        self.model = options.model

    def _url(self) -> str:
        options = self.options
        if options.server or (options.host is None and options.port is None):
            return str(options.server or options.base_url)
        host = options.host or "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{options.port or 8000}"

    def _headers(self) -> dict[str, str]:
        found = {"authorization": f"Bearer {self.options.api_key}"} if self.options.api_key else {}
        for text in self.options.header:
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"--header {text}: must be NAME=VALUE.")
            found[name.strip()] = value.strip()
        return found

    async def run(self) -> None:
        """Everything but the report. Cancelled before the load, there is nothing to report."""
        options = self.options
        async with Client(self.url, self._headers(), silence_s=options.timeout) as client:
            root = await self._find_model(client)
            self._tokenizer = _tokenizer(options.tokenizer, (root, self.model))
            form = await self._probe(client)
            if options.warmup:
                prompts = self._prompts(options.warmup, form, seed=options.seed + 1_000_003)
                warm = await run_load(client, self._jobs(client, prompts, form), [0.0] * len(prompts), self._room(1))
                if warm.interrupted:
                    return
            prompts = self._prompts(options.num_prompts, form, seed=options.seed)
            jobs = self._jobs(client, prompts, form)
            self._form, self._count = form, len(jobs)
            due = arrivals(len(jobs), options.request_rate, options.burstiness, options.seed)
            shown = sys.stderr.isatty() and not options.quiet
            self._run = await run_load(client, jobs, due, self._room(None), report.bar if shown else report.silent)

    def _room(self, default: int | None) -> int | None:
        return self.options.max_concurrency or default

    def report(self) -> int:
        """Print and save what there is; the exit code."""
        options, run = self.options, self._run
        if run is None:
            return ExitCode.INTERRUPTED
        summary = summarise(run.outcomes, run.unfinished, self.percentiles)
        if math.isinf(options.request_rate):
            summary.spreads.pop("late", None)  # all were due at once
        settings = self._settings()
        found = report.result(summary, settings, run.outcomes if options.save_detailed else None)
        place = options.output_json
        text = report.table(summary, printable(f"{self.url}{self.path}, model {self.model}"))
        print(text, file=sys.stderr if place == "-" else sys.stdout, flush=True)
        try:
            if place:
                report.save(found, place)
            if options.save_result:
                report.save(found, str(Path(options.result_dir) / (options.result_filename or self._file_name(found))))
        except OSError as e:
            raise ConfigError(f"the result cannot be written: {e}") from None
        if run.interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.FAILED if summary.failed or not summary.completed else ExitCode.OK

    def _settings(self) -> dict[str, Any]:
        options = self.options
        rate = options.request_rate
        return {
            "backend": "openai-chat" if self.chat else "openai",
            "base_url": self.url,
            "endpoint": self.path,
            "model_id": self.model,
            "num_prompts": self._count,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": options.burstiness,
            "max_concurrency": options.max_concurrency,
            "seed": options.seed,
            "dataset": str(options.dataset_path) if options.dataset_path else "random",
            "random_input_len": None if options.dataset_path else self.lengths.input,
            "random_output_len": None if options.dataset_path else self.lengths.output,
            "prompts_as": "ids" if self._form.ids else "text",
            "ignore_eos": options.ignore_eos,
            "temperature": options.temperature,
        }

    def _file_name(self, found: dict[str, Any]) -> str:
        rate = f"{self.options.request_rate:g}qps"
        name = "".join(c if c.isalnum() or c in "-._" else "-" for c in self.model.rpartition("/")[2])
        return f"{found['backend']}-{rate}-{name}-{found['date']}.json"

    # -------------------------------------------------------------------------------------------------- before the run

    async def _find_model(self, client: Client) -> str:
        """Set ``model`` if it was not given; the folder that the server says the model is in, or ``""``."""
        deadline = asyncio.get_running_loop().time() + self.options.ready_timeout
        while True:
            exchange = await client.get("/v1/models")
            if not exchange.error and exchange.status == 200:
                break
            if asyncio.get_running_loop().time() >= deadline:
                if self.model and exchange.status:  # not every server has the route
                    return ""
                raise RefusedError(f"no model at {self.url}: {_what(exchange)}. Is it a server of the OpenAI API?")
            await asyncio.sleep(0.25)
        try:
            entries = [(str(entry["id"]), str(entry.get("root") or "")) for entry in _json(exchange)["data"]]
        except (KeyError, TypeError, AttributeError):
            raise RefusedError(f"{self.url}/v1/models has another shape than OpenAI's") from None
        if not entries and not self.model:
            raise RefusedError(f"{self.url} lists no models; name one with --model")
        self.model = self.model or entries[0][0]
        return dict(entries).get(self.model, "")

    async def _probe(self, client: Client) -> Form:
        """The first form that the server takes, tried with one short request each."""
        options = self.options
        deadline = asyncio.get_running_loop().time() + options.ready_timeout
        forms = self._forms()
        place, refused = 0, ""
        while True:
            form = forms[place]
            prompt = replace(self._prompts(1, form, seed=options.seed + 2_000_003)[0], output_tokens=4)
            job = self._jobs(client, [prompt], form)[0]
            exchange = await client.send(job.request)
            status = exchange.status
            outcome = read(Outcome(0, 0.0, exchange.sent, exchange.ended, 4), exchange, replace(job, whole=False))
            if outcome.ok or outcome.error == SHORT:
                if refused:
                    _say(f"prompts go as {_named(form)}, since the server refused another form: {refused}")
                return form
            if status in (0, 502, 503) and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.25)
            elif status in (400, 422) and place + 1 < len(forms):
                place, refused = place + 1, refused or outcome.message
            else:
                before = f" (as {_named(forms[0])}: {refused})" if refused and refused != outcome.message else ""
                raise RefusedError(f"{self.url}{self.path}: {outcome.error}: {outcome.message}{before}")

    def _forms(self) -> list[Form]:
        options = self.options
        usage = [True, False] if options.count_by == "auto" else [options.count_by != "events"]
        as_ids = [not self.chat] if options.prompts_as == "auto" else [options.prompts_as == "ids"]
        if options.dataset_path is not None:
            as_ids = [False]  # as the file has them
        elif options.prompts_as == "auto" and not self.chat and self._tokenizer is not None:
            as_ids = [True, False]
        return [Form(ids, each) for ids in as_ids for each in usage]

    def _prompts(self, count: int | None, form: Form, seed: int) -> list[Prompt]:
        options = self.options
        if options.dataset_path is not None:
            return read_prompts(options.dataset_path, count, options.output_len, seed, self._tokenizer)
        count = count or 100
        if form.ids:
            return random_ids(count, self.lengths, seed, ordinary_ids(self._tokenizer))
        if self._tokenizer is None:
            raise ConfigError("Random text needs the model's tokenizer: give its folder with --tokenizer.")
        return random_texts(count, self.lengths, seed, self._tokenizer, add_special_tokens=not self.chat)

    def _jobs(self, client: Client, prompts: Sequence[Prompt], form: Form) -> list[Job]:
        options = self.options
        common: dict[str, Any] = {"model": self.model, "temperature": options.temperature, "stream": True}
        if form.usage:
            common["stream_options"] = {"include_usage": True}
            if options.count_by == "stream":
                common["stream_options"]["continuous_usage_stats"] = True
        if options.count_by == "ids":
            common["return_token_ids"] = True
        if options.ignore_eos:
            common["ignore_eos"] = True
        jobs = []
        for prompt in prompts:
            body = {**common, **self._asked(prompt), "max_tokens": prompt.output_tokens, **options.extra_body}
            data = msgspec.json.encode(body)
            whole = options.ignore_eos
            jobs.append(Job(client.render("POST", self.path, data), prompt.output_tokens, prompt.tokens, whole))
        return jobs

    def _asked(self, prompt: Prompt) -> dict[str, Any]:
        if not self.chat:
            return {"prompt": prompt.content}
        if not isinstance(prompt.content, str):
            raise ConfigError("Prompts of token ids cannot go to a chat; use --endpoint completions.")
        return {"messages": [{"role": "user", "content": prompt.content}]}


def _named(form: Form) -> str:
    return ("token ids" if form.ids else "text") + ("" if form.usage else ", tokens counted by events")


def _tokenizer(given: str, places: Sequence[str]) -> Tokenizer | None:
    """The one that was named, or that of a folder that the server names, if it is here."""
    if given:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            try:
                folder = Path(snapshot_download(given, allow_patterns=["*.json", "*.jinja"]))
            except (OSError, ValueError) as e:  # the hub's errors are among them
                raise ConfigError(f"--tokenizer {given}: no such folder, and not at the hub: {e}") from None
        return Tokenizer.from_folder(folder)
    for place in places:
        if place and (Path(place) / "tokenizer.json").is_file():
            with contextlib.suppress(ConfigError):
                return Tokenizer.from_folder(place)
    return None


def _what(exchange: Exchange) -> str:
    if exchange.error:
        return f"{exchange.error}: {exchange.message}"
    return f"HTTP {exchange.status}: {refusal(exchange.status, exchange.pieces)}"


def _json(exchange: Exchange) -> Any:
    try:
        return json.loads(exchange.body())
    except ValueError:
        raise KeyError from None


def _say(text: str) -> None:
    print(f"drumline bench serve: {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------- loop


def _run_loop(bench: Bench) -> int:
    """Run it. The first ctrl-C (or SIGTERM) ends the load and reports what there is, the second ends the command."""
    _raise_descriptor_limit()
    try:
        import uvloop

        factory: Any = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        loop = runner.get_loop()
        task = loop.create_task(bench.run())
        # An interrupt in the last moment does not cost the report.
        with _stopping(loop, task), contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    return bench.report()


@contextlib.contextmanager
def _stopping(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Iterator[None]:
    names = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        if not task.cancel() or task.cancelling() > 1:
            os._exit(ExitCode.INTERRUPTED)

    added = []
    for name in names:
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(name, stop)
            added.append(name)
    try:
        yield
    finally:
        for name in added:
            loop.remove_signal_handler(name)


def _raise_descriptor_limit() -> None:
    """A connection each."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
