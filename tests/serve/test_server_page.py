"""The page at `/`, in a headless browser: tokens are shaded, figures are live, nothing is fetched
from elsewhere."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from eagle3_core import load_draft
from eagle3_core.target import load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.server import ServerOptions

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(60_000)
    yield page
    page.close()


def ask(page: Page, text: str, tokens: int) -> None:
    page.fill("#tokens", str(tokens))
    page.fill("#prompt", text)
    page.click("#send")
    page.wait_for_selector("body[data-state=idle]")


def test_tokens_are_shaded_by_how_they_came_to_be(
    chain_pair: Any, run_server: Any, page: Page
) -> None:
    target = load_target(chain_pair.target)
    draft = load_draft(chain_pair.draft, target).draft
    engine = Engine(target, draft, EngineConfig(num_speculative_tokens=3))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    with run_server(engine, target, 3) as server:
        page.goto(server.url)
        expect(page.locator("#model")).to_contain_text("a draft of 3 tokens a round")
        ask(page, "<b>hello</b>", 12)
        assert page.locator(".turn.user").text_content() == "<b>hello</b>"
        turn = page.locator(".turn.assistant")
        assert turn.text_content() == "abcdefghijkl"
        tokens = turn.locator(".token")
        found = [
            (t.text_content(), t.get_attribute("data-source"), t.get_attribute("style"))
            for t in tokens.all()
        ]
        # 'a' comes with the prompt; the draft is wrong after 'e', so 'f' is the target's own; with
        # two tokens to come one is drafted.
        rounds = [["target"], ["draft"] * 3 + ["bonus"], ["bonus"], ["draft"] * 3 + ["bonus"]]
        rounds.append(["draft", "bonus"])
        assert [source for _, source, _ in found] == [s for one in rounds for s in one]
        assert "--depth: 2" in (found[2][2] or "")
        assert page.locator("#length").text_content() == f"{11 / 4:.2f}"
        assert page.locator("#tree rect").count() == 1
        tokens.nth(1).hover()
        assert page.locator("#tree rect").count() == 3
        assert page.locator("#tree-title").text_content() == "This round"
    assert problems == []
    assert all(url.startswith((server.url, "data:")) for url in asked)


def test_an_api_key_is_asked_for(chain_pair: Any, run_server: Any, page: Page) -> None:
    target = load_target(chain_pair.target)
    engine = Engine(target, None, EngineConfig())
    with run_server(engine, target, options=ServerOptions(api_key="secret")) as server:
        page.goto(server.url)
        ask(page, "hello", 3)
        expect(page.locator(".turn.error")).to_contain_text("API key")
        page.fill("#key", "secret")
        ask(page, "again", 3)
        expect(page.locator(".turn.assistant")).to_have_text("abc")
