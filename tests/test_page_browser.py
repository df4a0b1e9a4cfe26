"""The page in a real browser: each view, a pin and a forget, keys, markup in prompts, many nodes, a server that goes
away, a narrow screen."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from listening import WAIT, listening, wait_until

import onefold
from onefold.engine.engine import Engine
from onefold.server.settings import Settings

pytestmark = [pytest.mark.system("chromium"), pytest.mark.slow]

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the dev extra")
expect = playwright.expect
expect.set_options(timeout=60_000)

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    import shutil

    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGUMENTS))
        yield made
        made.close()


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from onefold.cache.tiers.disk.tier import DiskSettings

    disk = DiskSettings(tmp_path_factory.mktemp("disk"), None, "through", None)
    with Engine(*onefold.load(model), model_id="tiny", budget="64MB", disk=disk) as made:
        yield made


class Shown:
    """A page in the browser. Nothing may fail in it, and nothing may be asked of another host."""

    def __init__(self, browser: Any, url: str, **look: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | look))
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: set[str] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if "Content Security" in m.text else None)
        self.page.on("request", lambda request: self.asked.add(urlsplit(request.url).netloc))
        self.url = url
        self.page.goto(url)

    def view(self, name: str) -> Any:
        self.page.get_by_role("link", name=name, exact=True).click()
        section = self.page.locator(f"#{name.lower()}")
        expect(section).to_be_visible()
        return section

    def boxes(self) -> Any:
        return self.page.get_by_role("treeitem")

    def close(self) -> None:
        self.context.close()
        assert self.errors == []
        assert self.asked <= {urlsplit(self.url).netloc}


Show = Callable[..., AbstractContextManager[Shown]]


@pytest.fixture
def show(browser: Any, engine: Engine) -> Iterator[Show]:
    engine.clear()

    @contextmanager
    def made(look: dict[str, Any] | None = None, **settings: Any) -> Iterator[Shown]:
        with listening(engine, Settings(grace_seconds=0.5, **settings)) as url:
            shown = Shown(browser, url, **(look or {}))
            yield shown
            shown.close()

    yield made


def chat(url: str, text: str, key: str = "", **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = httpx.post(url + "/v1/chat/completions", json=body, headers=headers, timeout=WAIT)
    assert response.status_code == 200
    return response.headers["x-request-id"]


def is_call(message: Any) -> bool:
    """If a request or response is one of the API. The browser fetches the page's icon at a time of its own."""
    return urlsplit(message.url).path.startswith("/v1/")


def figure(shown: Shown, name: str) -> Any:
    return shown.page.locator("#figures div", has=shown.page.get_by_text(name, exact=True)).locator("dd")


def test_each_view_shows_what_the_server_holds(show: Show) -> None:
    with show() as shown:
        page = shown.page
        expect(page.get_by_role("heading", name="Now")).to_be_visible()
        expect(figure(shown, "Prefixes held")).to_have_text("0")
        shown.view("Tree")
        expect(page.get_by_text("Nothing is held yet")).to_be_visible()
        chat(shown.url, "the first of two that begin alike")
        chat(shown.url, "the first of two that go on apart")
        expect(shown.boxes()).to_have_count(3)
        wide = shown.boxes().nth(0)
        expect(wide).to_have_attribute("aria-label", re.compile(r"tokens, 0 to .* in memory"))
        widths = [shown.boxes().nth(i).bounding_box()["width"] for i in range(3)]
        assert widths[0] >= widths[1] + widths[2] - 2 and min(widths) > 0
        shown.view("Now")
        expect(figure(shown, "Prefixes held")).to_have_text("3")
        expect(figure(shown, "Hit rate, 1 minute")).to_have_text(re.compile(r"\d+\.\d %"))
        expect(page.locator("#budget-text")).to_contain_text("of 64.0 MB used")
        expect(page.locator("#charts canvas")).to_have_count(4)
        shown.view("Requests")
        expect(page.locator("#rows tr")).to_have_count(2)
        expect(page.locator("#rows tr").first.locator("td").nth(1)).to_have_text("cut at its limit of tokens")
        assert int(page.locator("#rows tr").first.locator("td").nth(4).inner_text()) > 10
        shown.view("Storage")
        expect(page.locator("#disk")).to_contain_text("Records")
        expect(page.locator("#remote")).to_contain_text("--remote URL")


def test_pin_and_forget(show: Show, engine: Engine) -> None:
    with show() as shown:
        page = shown.page
        chat(shown.url, "this shall stay in memory")
        shown.view("Tree")
        shown.boxes().first.click()
        expect(page.locator("#node-requests")).to_contain_text("computed")
        page.get_by_role("button", name="Pin", exact=True).click()
        expect(page.locator("#said")).to_have_text("Pinned: it stays in memory.")
        expect(shown.boxes().first).to_have_attribute("aria-label", re.compile("pinned"))
        engine.cache.inventory.shrink(0)
        assert len(engine.cache) > 0
        page.get_by_role("button", name="Unpin").click()
        expect(page.locator("#said")).to_have_text("Unpinned.")
        page.get_by_role("button", name="Forget").click()
        page.get_by_role("button", name="press again").click()
        expect(page.get_by_text("Nothing is held yet")).to_be_visible()
        assert len(engine.cache) == 0


def test_a_server_without_a_key_on_other_addresses_is_read_only(show: Show) -> None:
    with show(host="0.0.0.0") as shown:
        chat(shown.url, "nobody may change this")
        shown.view("Tree")
        shown.boxes().first.click()
        expect(shown.page.locator("#pin")).to_be_disabled()
        expect(shown.page.locator("#forget")).to_be_disabled()


def test_a_key_is_asked_for_and_kept_in_memory_only(show: Show) -> None:
    with show(api_keys=("right",)) as shown:
        page = shown.page
        chat(shown.url, "only for those who have the key", key="right")
        expect(page.get_by_role("heading", name="API key")).to_be_visible()
        expect(page.locator("#now")).to_be_hidden()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not valid")
        page.locator("#key").fill("right")
        page.get_by_role("button", name="Show the cache").click()
        expect(figure(shown, "Prefixes held")).to_have_text("1")
        shown.view("Tree")
        shown.boxes().first.click()
        page.get_by_role("button", name="Pin", exact=True).click()
        expect(page.locator("#said")).to_have_text("Pinned: it stays in memory.")
        stored = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert stored[:3] == [0, 0, ""] and "right" not in stored[3]
        page.reload()
        expect(page.get_by_role("heading", name="API key")).to_be_visible()


def test_markup_in_prompts_is_text(show: Show) -> None:
    with show(show_text=True) as shown:
        page = shown.page
        chat(shown.url, MARKUP + " one")
        httpx.post(
            shown.url + "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": MARKUP + " two"}], "max_tokens": 3},
            headers={"x-onefold-conversation": "<b onclick=1>bold</b>"},
            timeout=WAIT,
        )
        shown.view("Tree")
        shown.boxes().first.click()
        expect(page.locator("#text")).to_contain_text("<script>document.title=")
        shown.view("Requests")
        expect(page.locator("#rows")).to_contain_text("bold")
        assert page.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
        assert "broken" not in page.title()


def test_without_show_text_there_is_none(show: Show) -> None:
    with show() as shown:
        chat(shown.url, "a word that nobody shall see: rhubarb")
        shown.view("Tree")
        shown.boxes().first.click()
        expect(shown.page.locator("#node-requests")).to_contain_text("computed")
        assert "rhubarb" not in shown.page.content()


def test_five_thousand_nodes(show: Show, engine: Engine) -> None:
    import mlx.core as mx

    model = engine.cache.model
    assert model is not None
    for i in range(60):
        tokens = [40 + i % 50, *(5 + (7 * i + 3 * j) % 80 for j in range(99)), i % 90]
        with engine.cache.lease(tokens) as lease:
            mx.eval(model(mx.array([lease.rest.tolist()]), cache=lease.layers))
            lease.commit(tokens)
    with engine.cache.state.lock:
        for tree in engine.cache.state.nodes.trees.values():
            for node in [n for n in tree.root.walk() if not n.children]:
                for at in range(node.start + 1, node.end):
                    tree.split(node, at)
    assert engine.cache.stats().nodes >= 5000
    with show() as shown:
        page = shown.page
        shown.view("Tree")
        expect(shown.boxes().first).to_be_visible()
        count = shown.boxes().count()
        assert 100 < count <= 2000
        expect(shown.boxes().filter(has_text=re.compile("^$")).first).to_be_attached()
        merged = page.locator(".box.several")
        assert merged.count() > 0
        expect(merged.first).to_have_attribute("aria-label", re.compile("prefix"))
        shown.boxes().first.focus()
        page.keyboard.press("ArrowDown")
        expect(page.locator(".box:focus")).to_have_attribute("aria-level", "2")


def test_the_keyboard_alone_is_enough(show: Show) -> None:
    with show() as shown:
        page = shown.page
        chat(shown.url, "alike, and then one")
        chat(shown.url, "alike, and then two")
        expect(figure(shown, "Prefixes held")).to_have_text("3")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        for _ in range(2):
            page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Tree")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        page.keyboard.press("Tab")
        expect(shown.boxes().nth(0)).to_be_focused()
        page.keyboard.press("ArrowDown")
        expect(page.locator(".box:focus")).to_have_attribute("aria-posinset", "1")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".box:focus")).to_have_attribute("aria-posinset", "2")
        page.keyboard.press("Enter")
        expect(page.locator("#node-title")).to_be_visible()
        expect(shown.boxes()).to_have_count(1)
        expect(shown.boxes().first).to_be_focused()
        page.keyboard.press("Escape")
        expect(shown.boxes()).to_have_count(3)
        focused = page.locator(".box:focus").get_attribute("aria-label")
        page.wait_for_timeout(2500)
        assert page.locator(".box:focus").get_attribute("aria-level") == "2", "new pictures leave the focus"
        assert focused is not None


def focused(shown: Shown) -> str:
    found: str = shown.page.evaluate("document.activeElement.id || document.activeElement.className.split(' ')[0]")
    return found


def test_the_focus_and_what_was_said_stay_after_forgetting(show: Show) -> None:
    with show() as shown:
        page = shown.page
        for text in ("one that is forgotten", "another that stays"):
            chat(shown.url, text)
        shown.view("Tree")
        expect(shown.boxes()).to_have_count(3)
        shown.boxes().nth(1).focus()
        page.keyboard.press(" ")
        page.locator("#forget").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#forget")).to_contain_text("press again")
        page.locator("#pin").focus()
        expect(page.locator("#forget")).to_have_text("Forget")
        page.locator("#forget").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.locator("#said")).to_have_text(re.compile("tokens forgotten"))
        expect(page.locator("#node")).to_be_hidden()
        assert focused(shown) == "box"
        page.wait_for_timeout(2100)
        expect(page.locator("#said")).to_have_text(re.compile("tokens forgotten"))
        httpx.delete(shown.url + "/v1/cache")
        expect(page.get_by_text("Nothing is held yet")).to_be_visible()
        assert focused(shown) == "tree"


def test_assistive_technology_reads_the_tree_in_its_order(show: Show, engine: Engine) -> None:
    with show() as shown:
        for text in ("alike, one", "alike, two, and one", "alike, two, and two"):
            chat(shown.url, text)
        shown.view("Tree")
        expect(shown.boxes()).to_have_count(5)
        items = "(e) => e.map((b) => [b.ariaLevel, b.ariaPosInSet, b.ariaSetSize].map(Number))"
        levels = shown.boxes().evaluate_all(items)
        assert sorted(levels) == [[1, 1, 1], [2, 1, 2], [2, 2, 2], [3, 1, 2], [3, 2, 2]]
        for before, after in itertools.pairwise(levels):
            assert after[0] <= before[0] + 1, "a prefix comes right before what is below it"
        expect(shown.page.locator(".box:not([aria-label*='disk'])")).to_have_count(0)  # all are written
        without_age = "(e) => e.map((b) => b.ariaLabel.split(', used')[0])"
        names = shown.boxes().evaluate_all(without_age)
        assert len(set(names)) >= 3
        shown.page.wait_for_timeout(1500)
        assert shown.boxes().evaluate_all(without_age) == names


def test_what_is_open_follows_what_happens(show: Show) -> None:
    with show() as shown:
        page = shown.page
        chat(shown.url, "pinned by somebody else")
        shown.view("Tree")
        shown.boxes().first.click()
        expect(page.locator("#pin")).to_have_text("Pin")
        (name,) = httpx.get(shown.url + "/v1/page").json()["tree"]
        httpx.post(f"{shown.url}/v1/page/nodes/{name}/pin")
        expect(page.locator("#pin")).to_have_text("Unpin")
        expect(page.locator("#node-facts")).to_contain_text("not now: it is pinned")
        shown.view("Now")
        expect(figure(shown, "Pinned")).not_to_have_text("0 bytes")


def quiet(shown: Shown, drawn: list[int]) -> bool:
    """Returns whether the server draws no picture for 1.5 s, which is longer than the pause between two."""
    before = len(drawn)
    shown.page.wait_for_timeout(1500)
    return len(drawn) == before


def test_a_hidden_tab_has_no_stream(show: Show, engine: Engine) -> None:
    hide = "(is) => { Object.defineProperty(document, 'hidden', { value: is, configurable: true }); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    with show() as shown:
        expect(figure(shown, "Prefixes held")).to_have_text("0")
        drawn: list[int] = []
        outline = engine.cache.view.outline
        engine.cache.view.outline = lambda: drawn.append(1) or outline()  # type: ignore[method-assign]
        try:
            shown.page.evaluate(hide, True)
            wait_until(lambda: quiet(shown, drawn), "the tree is still drawn", seconds=0.3)
            before = len(drawn)
            chat(shown.url, "nobody looks")
            assert quiet(shown, drawn) and len(drawn) == before
        finally:
            del engine.cache.view.outline
        expect(shown.page.locator("#link")).to_have_text("")
        shown.page.evaluate(hide, False)
        expect(figure(shown, "Prefixes held")).to_have_text("1")


def test_a_bug_of_the_page_is_not_a_failure_of_the_link(show: Show) -> None:
    with show() as shown:
        page = shown.page
        expect(figure(shown, "Prefixes held")).to_have_text("0")
        for name in ("__proto__", "constructor", "toString"):
            page.evaluate("(name) => { location.hash = name; }", name)
            expect(page.locator("#now")).to_be_visible()
        assert shown.errors == []
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if is_call(request) else None)
        with page.expect_event("pageerror"):
            page.evaluate("document.getElementById('figures').id = 'lost'")
        page.wait_for_timeout(2500)
        assert len(shown.errors) >= 1 and asked == []
        expect(page.locator("#link")).to_have_text("")
        page.evaluate("document.getElementById('lost').id = 'figures'")
        shown.view("Tree")
        shown.errors.clear()
        chat(shown.url, "drawn again")
        expect(shown.boxes()).to_have_count(1)


def test_one_stream_for_one_key(show: Show) -> None:
    with show(api_keys=("right",)) as shown:
        page = shown.page
        expect(page.locator("#key")).to_be_focused()
        answers: list[int] = []
        page.on("response", lambda response: answers.append(response.status) if is_call(response) else None)
        page.locator("#key").fill("schl\u00fcssel\u2603")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("ASCII")
        assert answers == []
        submit = "() => { for (let i = 0; i < 2; i++) { document.getElementById('key').value = 'right'; "
        submit += "document.getElementById('login').dispatchEvent(new Event('submit', { cancelable: true })); } }"
        page.evaluate(submit)
        expect(page.locator("#now")).to_be_visible()
        expect(page.locator("#main")).to_be_focused()
        assert answers.count(200) <= 2


def drawn(shown: Shown, *changes: Callable[[dict[str, Any]], None]) -> None:
    """Shows pictures of the server that were changed, one after the other."""
    body = ""
    for change in changes:
        picture = httpx.get(shown.url + "/v1/page").json()
        change(picture)
        body += f"event: picture\ndata: {json.dumps(picture)}\n\n"
    shown.page.route("**/v1/page/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    shown.page.reload()


def test_prefixes_without_bytes_are_as_wide_as_what_is_below_them(show: Show) -> None:
    def change(picture: dict[str, Any]) -> None:
        plain = {"space": 0, "start": 0, "end": 5, "bytes": 0, "total": 0, "used": 1.0, "readers": 0, "pins": 0}
        plain |= {"where": "m", "shared": 0, "turn": 1}
        picture["tree"] = {"1": plain | {"above": ""}, "2": plain | {"above": "1"}, "3": plain | {"above": "1"}}
        picture["tree"]["4"] = plain | {"above": "", "where": "d", "shared": 3}
        picture["spaces"] = {"0": ""}

    with show() as shown:
        drawn(shown, change)
        shown.view("Tree")
        expect(shown.boxes()).to_have_count(4)
        shown.page.wait_for_timeout(300)
        widths = shown.boxes().evaluate_all("(e) => e.map((b) => Math.round(parseFloat(b.style.width)))")
        assert widths == [67, 33, 33, 33]
        placed = re.compile(r"disk and the shared store \(3 tokens\)")
        expect(shown.boxes().nth(3)).to_have_attribute("aria-label", placed)
        expect(shown.boxes().nth(3)).to_have_attribute("aria-label", re.compile("used more than a day ago"))
        shown.boxes().nth(3).click()
        expect(shown.page.locator("#node-why")).to_have_text("Only what is in memory can be pinned.")


def test_charts_go_on_after_the_server_s_clock_was_set_back(show: Show) -> None:
    def at(time: float) -> Callable[[dict[str, Any]], None]:
        return lambda picture: picture["now"].update(time=time)

    with show() as shown:
        drawn(shown, at(1000.0), at(500.0), at(501.0))
        chart = shown.page.locator("#charts .uplot").first
        expect(chart).to_have_attribute("aria-label", re.compile("over 2 seconds"))


def test_a_server_that_does_not_answer_is_told(show: Show) -> None:
    with show() as shown:
        page = shown.page
        chat(shown.url, "nothing is heard of this")
        page.clock.install()
        page.reload()
        page.route("**/v1/page/nodes/*", lambda route: None)
        shown.view("Tree")
        shown.boxes().first.click()
        page.clock.fast_forward(21_000)
        expect(page.locator("#said")).to_have_text("The server has not answered for 20 s.")


def test_parts_of_the_budget_and_swatches_have_edges_and_one_size(show: Show) -> None:
    with show() as shown:
        expect(figure(shown, "Prefixes held")).to_have_text("0")
        edges = "(e) => e.map((d) => [getComputedStyle(d).borderRightWidth, getComputedStyle(d).boxShadow])"
        weights, *others = shown.page.locator("#budget > div:not(.limit)").evaluate_all(edges)
        assert weights[0] == "3px" and all(shadow != "none" for _, shadow in others)
        shown.view("Tree")
        sizes = shown.page.locator("#ages .swatch").evaluate_all("(e) => e.map((s) => [s.offsetWidth, s.offsetHeight])")
        assert len(sizes) == 7 and all(size == sizes[0] for size in sizes)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ages_differ_in_lightness_and_can_be_read(show: Show, scheme: str) -> None:
    with show({"color_scheme": scheme}) as shown:
        shades: list[tuple[float, float]] = shown.page.evaluate(SHADES)
        paper = [light for light, _ in shades]
        assert paper == sorted(paper, reverse=scheme == "dark")
        for a, b in itertools.pairwise(paper):
            assert (max(a, b) + 0.05) / (min(a, b) + 0.05) >= 1.3
        assert all((max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5 for pair in shades)


def test_a_server_that_goes_away_and_returns(browser: Any, engine: Engine) -> None:
    engine.clear()
    with listening(engine) as url:
        shown = Shown(browser, url)
        expect(figure(shown, "Prefixes held")).to_have_text("0")
        chat(url, "it is there at first")
        shown.view("Tree")
        shown.boxes().first.click()
        shown.page.locator("#forget").click()
    expect(shown.page.locator("#link")).to_contain_text("Trying again")
    expect(shown.boxes()).to_have_count(1)
    with listening(engine, port=int(url.rpartition(":")[2])):
        expect(shown.page.locator("#said")).to_have_text("The server has started again: its prefixes are others.")
        expect(shown.page.locator("#node")).to_be_hidden()
        shown.view("Now")
        chat(url, "it is there again")
        expect(shown.page.locator("#link")).to_have_text("")
        expect(figure(shown, "Prefixes held")).to_have_text("3")
        shown.close()


@pytest.mark.parametrize("width", [360, 2560])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_and_wide_light_and_dark(show: Show, width: int, scheme: str) -> None:
    look = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "reduced_motion": "reduce"}
    with show(look) as shown:
        chat(shown.url, "seen on many screens")
        for name in ("Now", "Tree", "Requests", "Storage"):
            shown.view(name)
            shown.page.wait_for_timeout(100)
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, name
        paper = shown.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
        shown.view("Tree")
        expect(shown.boxes().first).to_be_visible()
        assert shown.page.evaluate("getComputedStyle(document.querySelector('.box')).transitionDuration") == "0s"


CONTRASTS = """() => {
  const parts = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const found = parts(getComputedStyle(e).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
  };
  const bad = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest(".u-wrap, .skip") || e.disabled) continue;
    const [a, b] = [light(parts(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(e.textContent.slice(0, 40));
  }
  return bad;
}"""
SHADES = """() => {
  const light = (name) => {
    const at = document.createElement("div");
    at.className = name;
    document.body.append(at);
    const of = (c) => c.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const found = [of(getComputedStyle(at).backgroundColor), of(getComputedStyle(at).color)];
    at.remove();
    return found;
  };
  return [0, 1, 2, 3, 4, 5].map((i) => light(`age${i}`));
}"""
NAMELESS = """() => [...document.querySelectorAll("button, a, input, [role=tree], [role=treeitem], section, nav")]
  .filter((e) => e.checkVisibility() && !(e.textContent.trim() || e.ariaLabel || e.getAttribute("aria-labelledby")
    || (e.labels && e.labels.length))).map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_and_has_a_name(show: Show, scheme: str) -> None:
    with show({"color_scheme": scheme}) as shown:
        chat(shown.url, "that can be read")
        for name in ("Now", "Tree", "Requests", "Storage"):
            shown.view(name)
            if name == "Tree":
                shown.boxes().first.click()
                expect(shown.page.locator("#node-requests")).to_contain_text("computed")
            assert shown.page.evaluate(CONTRASTS) == [], name
            assert shown.page.evaluate(NAMELESS) == [], name


def test_what_one_leaves_behind(show: Show, engine: Engine) -> None:
    """A page that is closed is a viewer no more."""
    with show() as shown:
        expect(figure(shown, "Prefixes held")).to_have_text("0")
        drawn: list[int] = []
        outline = engine.cache.view.outline
        engine.cache.view.outline = lambda: drawn.append(1) or outline()  # type: ignore[method-assign]
        try:
            shown.page.goto("about:blank")
            wait_until(lambda: quiet(shown, drawn), "the tree is still drawn", seconds=0.3)
        finally:
            del engine.cache.view.outline
        shown.asked.clear()
