"""The pages, in a headless Chromium: one of the machine's own, or playwright's.

``DRUMLINE_BROWSER=required`` (as ``.ci/run`` sets it) makes a missing browser a failure; elsewhere the tests are
skipped, and the summary says so.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Error, Page, async_playwright, expect

from drumline.text.tokenizer import Tokenizer

from .peer import Served, make_ready, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    # Chromium and its driver leave marks in their home and their temporary folder.
    home = str(tmp_path_factory.mktemp("chromium"))
    env = dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", home)
        playwright = await async_playwright().start()
    try:
        started = await playwright.chromium.launch(executable_path=found, args=FLAGS, env={**os.environ, **env})
        try:
            yield started
        finally:
            await started.close()
    except Error as error:
        if os.environ.get("DRUMLINE_BROWSER") == "required":
            raise
        pytest.skip(f"NO CHROMIUM, THE PAGES ARE NOT TESTED: {str(error).splitlines()[0]}")
    finally:
        await playwright.stop()


def _is_ours(text: str) -> bool:
    """What the server refuses the browser reports too; the page shows that itself."""
    return "the server responded with a status of" not in text


@asynccontextmanager
async def shown(browser: Browser, server: Served, path: str = "/") -> AsyncIterator[Page]:
    """A page; the browser may find nothing wrong with it."""
    page = await browser.new_page(viewport={"width": 900, "height": 700})
    page.set_default_timeout(10_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" and _is_ours(said.text) else None)
    try:
        await page.goto(server.url + path)
        yield page
    finally:
        await page.close()
    assert not wrong


async def ask(page: Page, text: str) -> None:
    await page.fill("#text", text)
    await page.press("#text", "Enter")


async def answered(page: Page) -> None:
    await expect(page.locator("#stop")).to_be_hidden(timeout=10_000)


def say(server: Served, folder: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_folder(folder)
    ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
    server.engine.script = lambda request: ids
    return ids


async def test_a_conversation(browser: Browser, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    async with served(folder) as server, shown(browser, server) as page:
        ids = say(server, folder, "The lazy dog <b>🎉</b>")
        server.engine.pause_s = 0.002
        for place, word in enumerate(("hello", "again")):
            await ask(page, word)
            answer = page.locator(".assistant").nth(place)
            # as text, never as HTML
            await expect(answer.locator("p").first).to_have_text("The lazy dog <b>🎉</b>")
            await answered(page)
            meta = await answer.locator(".meta").inner_text()
            assert re.fullmatch(rf"first token \d+ ms · [\d.]+ tokens/s · {len(ids)} tokens", meta)
        prompt = tokenizer.decode(server.engine.seen[1].prompt_token_ids, skip_special_tokens=False)
        assert "user\nhello<|im_end|>\n<|im_start|>assistant\nThe lazy dog <b>🎉</b><|im_end|>\n" in prompt
        assert "user\nagain" in prompt

        await page.click("#clear")
        await expect(page.locator(".message")).to_have_count(0)
        await ask(page, "anew")
        await answered(page)
        prompt = tokenizer.decode(server.engine.seen[2].prompt_token_ids, skip_special_tokens=False)
        assert "hello" not in prompt


async def test_models_and_settings(browser: Browser, folder: Path) -> None:
    async with served(folder) as server, shown(browser, server) as page:
        options = page.locator("#model option")
        await expect(options).to_have_text(["tiny", "alias/of-tiny"])
        await page.select_option("#model", "alias/of-tiny")
        await page.click("summary")
        for name, value in (("temperature", "0.5"), ("max_tokens", "3"), ("seed", "7"), ("system", "be short")):
            await page.fill(f"#{name}", value)
        async with page.expect_request("**/v1/chat/completions") as sent:
            await ask(page, "hello")
        body = (await sent.value).post_data_json
        assert body["model"] == "alias/of-tiny"
        assert body["messages"][0] == {"role": "system", "content": "be short"}
        assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.5, 3, 7)
        await expect(page.locator(".assistant .meta")).to_contain_text("3 tokens · cut off at the token limit")


async def test_stop_frees_the_request(browser: Browser, folder: Path) -> None:
    async with served(folder) as server, shown(browser, server) as page:
        server.engine.pause_s = 0.05
        await ask(page, "hello")
        await expect(page.locator(".assistant p").first).to_have_text(re.compile(".{4}", re.DOTALL))
        server.engine.gate.clear()
        await page.click("#stop")
        await expect(page.locator(".assistant .meta")).to_have_text(re.compile("tokens · stopped$"))
        await server.engine.until(0)
        server.engine.gate.set()
        # it goes on after that
        say(server, folder, "fine")
        await ask(page, "again")
        await expect(page.locator(".assistant p").nth(1)).to_have_text("fine")


async def test_errors_are_shown(browser: Browser, folder: Path) -> None:
    async with served(folder) as server, shown(browser, server) as page:
        await ask(page, "word " * 400)
        await expect(page.locator(".error")).to_contain_text("at most 256 tokens")
        server.engine.pause_s = 0.05
        await ask(page, "hello")
        await expect(page.locator(".assistant").nth(1).locator("p").first).not_to_be_empty()
        server.engine.die()
        await expect(page.locator(".error").nth(1)).to_contain_text("Worker_TP1 rank 1")


async def test_it_waits_for_the_model(browser: Browser, folder: Path) -> None:
    async with served(folder, ready=False) as server, shown(browser, server) as page:
        server.service.set_phase("converting 40%")
        await expect(page.locator("#state")).to_contain_text("converting 40%")
        await expect(page.locator("#send")).to_be_disabled()
        make_ready(server.service, server.engine, folder)
        await expect(page.locator("#send")).to_be_enabled()
        await expect(page.locator("#state")).to_be_empty()


async def test_docs(browser: Browser, folder: Path) -> None:
    async with served(folder) as server, shown(browser, server, "/docs") as page:
        await expect(page.locator("body")).to_contain_text("/v1/chat/completions")
        await page.locator("summary").first.click()
        await expect(page.locator("body")).to_contain_text("max_tokens")
