"""The page in a real browser: two walks side by side, live, and playback over what has come."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="fastapi comes with clew[ray]")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

import openai_server
from fastapi import FastAPI
from openai_server import ReferenceServer
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from clew.envs.maze_env import MazeEnv, answer_text
from clew.recipe import load_recipe
from clew.serving.page import page_app

CHROMIUM = Path("/usr/bin/chromium")
if not CHROMIUM.exists():
    pytest.skip("no /usr/bin/chromium", allow_module_level=True)

Shared = tuple[ReferenceServer, str, Browser]
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with openai_server.warm_start_server() as server:
        outer = FastAPI()
        outer.mount("/watch", page_app(load_recipe("laptop", ()), server.url))
        with openai_server.listening(outer) as url, sync_playwright() as started:
            browser = started.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
            yield server, f"{url}/watch", browser
            browser.close()


@pytest.fixture
def server(shared: Shared) -> ReferenceServer:
    shared[0].asked, shared[0].hook, shared[0].key = [], lambda number, body: None, None
    return shared[0]


@pytest.fixture
def page(server: ReferenceServer, shared: Shared) -> Iterator[Page]:
    yield from opened(shared, viewport={"width": 1180, "height": 860})


@pytest.fixture
def phone(server: ReferenceServer, shared: Shared) -> Iterator[Page]:
    yield from opened(shared, viewport={"width": 390, "height": 844}, color_scheme="dark", device_scale_factor=2)


def opened(shared: Shared, **options: Any) -> Iterator[Page]:
    context = shared[2].new_context(**options)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if "Security" in message.text else None)
    page.goto(shared[1])
    yield page
    context.close()
    assert not complaints


def side(page: Page, which: int) -> Locator:
    return page.locator(f".side[data-side='{which}']")


def shown(page: Page) -> list[str]:
    return [side(page, which).locator(".frame").get_attribute("src") for which in (0, 1)]


def on_screen(page: Page, which: int) -> np.ndarray:
    """The picture as the screen has it, shrunk to the size it came in."""
    shot = Image.open(io.BytesIO(side(page, which).locator(".frame").screenshot())).convert("RGB")
    return np.asarray(shot.resize((96, 64), Image.Resampling.NEAREST)).astype(int)


def test_two_models_walk_the_same_maze(page: Page, server: ReferenceServer) -> None:
    """Live: the second turn is held back until the first is on the screen; then pause, step, back, seek, replay."""
    expect(side(page, 0).locator(".frame")).to_have_attribute("src", re.compile("^data:image/png"))
    expect(page.get_by_role("combobox", name="Left model")).to_have_value("warm-start")
    expect(page.get_by_role("combobox", name="Right model")).to_have_value("warm-start:noise")
    first = shown(page)
    assert first[0] == first[1], "both see the same maze"

    page.get_by_label("Maze").fill("3")
    page.get_by_label("Maze").press("Tab")
    expect(page.locator("#facts")).to_have_text("The shortest way takes 11 turns; at most 15 are allowed.")
    assert shown(page)[0] != first[0], "the other maze is shown before anybody walks"

    go_on = threading.Event()

    def hook(number: int, body: dict[str, Any]) -> None:
        if len(body["messages"]) > 1:
            assert go_on.wait(30)

    server.hook = hook
    page.get_by_label("Speed").select_option("4")
    page.get_by_label("Answers").select_option("greedy")
    page.get_by_role("button", name="Walk").click()
    expect(page.locator("#at")).to_have_text("turn 1 of 1 so far")
    expect(side(page, 0).locator(".badge")).to_have_text("Walking")
    go_on.set()
    expect(page.locator("#at")).to_have_text(re.compile(r"^turn (\d+) of \1$"), timeout=20_000)
    expect(side(page, 0).locator(".badge")).to_have_text("Solved in 11 turns")
    assert "Left model: Solved in 11 turns." in page.locator("#spoken").text_content()
    asked = len(server.asked)
    env = MazeEnv(size=(4, 6), min_path=7, max_path=12)
    env.reset(1_000_000_003)
    for action in side(page, 0).locator(".turns b").all_text_contents():
        env.step(answer_text({"\u2191": "up", "\u2193": "down", "\u2190": "left", "\u2192": "right"}[action]))
    same = (abs(on_screen(page, 0) - env.frame()).max(-1) < 30).mean()
    assert same > 0.97, "the maze is drawn large and sharp (its edges may fall between pixels, its corners are round)"

    turns = side(page, 0).locator(".turns li")
    expect(turns).to_have_count(11)
    expect(side(page, 0).locator(".answer")).to_have_text(re.compile("^<action>.*</action>$"))
    end = shown(page)[0]
    turns.nth(4).get_by_role("button").click()
    expect(page.locator("#at")).to_have_text(re.compile("^turn 5 of"))
    fifth = shown(page)[0]
    page.get_by_role("button", name="One turn back").click()
    assert shown(page)[0] not in (fifth, end)
    page.get_by_role("button", name="One turn on").click()
    assert shown(page)[0] == fifth
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#at")).to_have_text(re.compile("^turn 6 of"))
    page.keyboard.press("Home")
    expect(page.locator("#at")).to_have_text(re.compile("^turn 0 of"))
    expect(side(page, 1).locator(".badge")).to_have_text("Walking")
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Play", exact=True).click()
    expect(side(page, 0).locator(".badge")).to_have_text("Solved in 11 turns", timeout=20_000)
    assert shown(page)[0] == end
    assert len(server.asked) == asked, "a replay asks nobody"


def test_sampled_walks_differ_from_each_other(page: Page, server: ReferenceServer) -> None:
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Random").click()
    walks = []
    for _ in range(2):
        page.get_by_role("button", name="Walk").click()
        expect(page.locator("#at")).to_have_text(re.compile(r"^turn \d+ of [1-9]\d*$"), timeout=30_000)
        walks.append(side(page, 1).locator(".turns li").all_text_contents())
        assert {body["temperature"] for body in server.asked} == {1.0}
    assert walks[0] != walks[1]


def test_on_a_phone_and_in_the_dark(phone: Page) -> None:
    expect(side(phone, 0).locator(".frame")).to_have_attribute("src", re.compile("^data:image/png"))
    assert phone.evaluate("document.documentElement.scrollWidth") == 390, "nothing sticks out"
    left, right = (side(phone, which).bounding_box() for which in (0, 1))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"], "side by side"
    for button in phone.get_by_role("group", name="Playback").get_by_role("button").all():
        box = button.bounding_box()
        assert box["width"] >= 40 and box["height"] >= 40
    assert sum(phone.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")) < 100


def test_the_page_asks_for_the_key(page: Page, server: ReferenceServer) -> None:
    """It is kept in memory alone: a page that is loaded again asks again."""
    server.key = "of-the-visitor-0123456789"
    page.reload()
    field = page.get_by_label("API key")
    expect(field).to_be_visible()
    expect(page.get_by_role("button", name="Walk")).to_be_hidden()
    field.fill("wrong")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server refuses this key.")
    field.fill(server.key)
    field.press("Enter")
    expect(field).to_be_hidden()
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Walk").click()
    expect(page.locator("#at")).to_have_text(re.compile(r"^turn ([1-9]\d*) of \1$"), timeout=30_000)
    stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
    assert server.key not in stored and server.key not in page.content()
    page.reload()
    expect(field).to_be_visible()


def test_what_goes_wrong_is_shown(page: Page, server: ReferenceServer) -> None:
    def hook(number: int, body: dict[str, Any]) -> Any:
        broken = body["model"] == "warm-start:noise"
        return openai_server.error(422, "adapter noise is broken") if broken else None

    server.hook = hook
    page.get_by_label("Speed").select_option("4")
    page.get_by_label("Answers").select_option("greedy")
    page.get_by_role("button", name="Walk").click()
    expect(side(page, 1).locator(".badge")).to_contain_text("adapter noise is broken")
    expect(side(page, 0).locator(".badge")).to_contain_text("olved", timeout=20_000)
    page.get_by_label("Maze").fill("64")
    page.get_by_label("Maze").press("Tab")
    page.get_by_role("button", name="Walk").click()
    assert page.get_by_label("Maze").evaluate("element => element.validity.rangeOverflow")
