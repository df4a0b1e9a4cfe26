"""The page over HTTP, on a real engine: who may see it, who may change something, what is shown, and what is not."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from listening import WAIT, listening, wait_until

import onefold
from onefold.engine.engine import Engine
from onefold.engine.request import Hit, Started
from onefold.errors import ConfigError
from onefold.page.history import History
from onefold.page.page import Page
from onefold.server.record import Record
from onefold.server.settings import Settings

KEY = {"authorization": "Bearer secret"}
BROWSER = {"accept": "text/html,application/xhtml+xml"}
SECRET_TEXT = "<img src=x onerror=alert(1)> the code is 7391"


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(*onefold.load(model), model_id="tiny", budget="64MB") as made:
        yield made


Client = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture
def serve(engine: Engine) -> Iterator[Client]:
    engine.clear()

    @contextmanager
    def made(**settings: Any) -> Iterator[httpx.Client]:
        given = Settings(grace_seconds=0.5, **settings)
        with listening(engine, given) as url, httpx.Client(base_url=url, timeout=WAIT) as client:
            yield client

    yield made


def chat(client: httpx.Client, text: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    response = client.post("/v1/chat/completions", json=body, headers=headers or {})
    assert response.status_code == 200, response.text
    return response


def picture(client: httpx.Client, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/v1/page", **more).json()
    return found


# -- the files -------------------------------------------------------------------------------------


def test_a_browser_gets_the_page_and_others_what_they_always_got(serve: Client) -> None:
    with serve() as client:
        page = client.get("/", headers=BROWSER)
        assert page.status_code == 200 and page.text.startswith("<!doctype html>")
        assert page.headers["content-type"] == "text/html; charset=utf-8" and page.headers["vary"] == "accept"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert client.get("/").json() == {"server": "onefold"} and client.head("/", headers=BROWSER).text == ""
        for name in ("main.js", "style.css", "vendor/uPlot.js", "vendor/uPlot-LICENSE.txt", "icon.svg"):
            found = client.get(f"/page/{name}")
            assert found.status_code == 200 and "content-security-policy" in found.headers, name
        for name in ("nothing.js", "../page.py", "%2e%2e/page.py", "", "vendor", "/etc/passwd"):
            assert client.get(f"/page/{name}").status_code == 404, name


def test_the_page_has_no_inline_script_or_style_and_names_no_other_host() -> None:
    static = Path(onefold.__file__).parent / "page" / "static"
    html = (static / "index.html").read_text()
    assert "<script>" not in html and "<style" not in html and "style=" not in html and " on" + "click" not in html
    for file in static.rglob("*"):
        if file.suffix in (".html", ".js", ".css") and file.parent.name != "vendor":
            text = file.read_text()
            assert "://" not in text.replace("http://www.w3.org", ""), file.name
            for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert name not in text, f"{file.name} has {name}"


def test_without_the_page_there_is_nothing_of_it(serve: Client) -> None:
    with serve(page=False) as client:
        assert client.get("/", headers=BROWSER).json() == {"server": "onefold"}
        for path in ("/page/main.js", "/v1/page", "/v1/page/events", "/v1/page/nodes/1"):
            assert client.get(path).status_code == 404
        assert client.post("/v1/page/nodes/1/pin").status_code == 404


# -- who may see and change ------------------------------------------------------------------------


def test_the_data_needs_the_key_and_the_files_do_not(serve: Client) -> None:
    with serve(api_keys=("secret",)) as client:
        assert client.get("/", headers=BROWSER).status_code == 200 and client.get("/page/main.js").status_code == 200
        for path in ("/v1/page", "/v1/page/events", "/v1/page/nodes/1"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        for action in ("pin", "unpin", "forget"):
            assert client.post(f"/v1/page/nodes/1/{action}").status_code == 401
        assert picture(client, headers=KEY)["server"]["may_change"] is True


def test_another_page_may_not_ask_and_the_server_s_own_may(serve: Client) -> None:
    with serve() as client:
        own = {"origin": f"http://{client.base_url.netloc.decode()}"}
        own["x-onefold-server"] = picture(client)["server"]["id"]
        assert client.post("/v1/page/nodes/1/pin", headers=own).status_code == 404, "it may, and there is no such node"
        port = client.base_url.port
        for origin in (
            "http://evil.example", f"http://localhost:{port}", "http://127.0.0.1", f"http://127.0.0.1:{port}.evil",
            f"ftp://127.0.0.1:{port}", "null", f"http://x@127.0.0.1:{port}",
        ):  # fmt: skip
            response = client.post("/v1/page/nodes/1/pin", headers={"origin": origin})
            assert response.status_code == 403 and "Origin" in response.json()["error"]["message"], origin
        rebound = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"}
        assert client.post("/v1/page/nodes/1/pin", headers=rebound).status_code == 403


def test_without_a_key_only_the_loopback_may_change_anything(engine: Engine) -> None:
    from starlette.testclient import TestClient

    from onefold.server.app import make_app

    for settings, allowed in (
        (Settings(host="0.0.0.0"), False),
        (Settings(host="0.0.0.0", api_keys=("secret",)), True),
        (Settings(host="::1"), True),
        (Settings(host="localhost"), True),
        (Settings(host="box.local"), False),
    ):
        with TestClient(make_app(engine, settings), base_url="http://127.0.0.1") as client:
            response = client.post("/v1/page/nodes/1/pin", headers=KEY)
            assert response.status_code == (404 if allowed else 403), settings.host
            if not allowed:
                assert "--api-key-file" in response.json()["error"]["message"]
            assert client.get("/v1/page", headers=KEY).json()["server"]["may_change"] is allowed


def test_a_browser_names_the_server_that_it_shows(serve: Client, engine: Engine) -> None:
    """After a restart the numbers of prefixes are those of others."""
    with serve() as client:
        chat(client, "something that shall not be forgotten by mistake")
        found = picture(client)
        (name,), own = found["tree"], {"origin": f"http://{client.base_url.netloc.decode()}"}
        node = f"/v1/page/nodes/{name}"
        for headers in (own, own | {"x-onefold-server": "another"}, {"x-onefold-server": "another"}):
            refused = client.post(f"{node}/forget", headers=headers)
            assert refused.status_code == 409 and "restart" in refused.json()["error"]["message"]
        assert len(engine.cache) > 0
        assert client.post(f"{node}/pin").json() == {"pinned_here": True}, "a program may leave it out"
        named = own | {"x-onefold-server": found["server"]["id"]}
        assert client.post(f"{node}/unpin", headers=named).json() == {"pinned_here": False}
    with serve() as client:
        assert picture(client)["server"]["id"] != found["server"]["id"]


def test_a_prefix_has_one_name(serve: Client, engine: Engine) -> None:
    with serve() as client:
        chat(client, "something that shall stay in memory")
        (name,) = picture(client)["tree"]
        for said in (f"+{name}", f"%20{name}", f"{name}.0", f"0{name}", "x", "-1", "0", "1" * 30, "%D9%A1"):
            for found in (client.get(f"/v1/page/nodes/{said}"), client.post(f"/v1/page/nodes/{said}/forget")):
                assert found.status_code == 404 and "error" in found.json(), said
        assert len(engine.cache) > 0


def test_only_the_page_itself_reads_its_data_in_a_browser(serve: Client) -> None:
    with serve(cors_origins=("*",), show_text=True) as client:
        evil = {"origin": "http://evil.example"}
        assert client.get("/v1/models", headers=evil).headers["access-control-allow-origin"] == "*"
        preflight = evil | {"access-control-request-method": "GET", "access-control-request-headers": "authorization"}
        for refused in (
            client.get("/v1/page", headers=evil),
            client.get("/v1/page/nodes/1", headers=evil),
            client.post("/v1/page/nodes/1/pin", headers=evil),
            client.options("/v1/page", headers=preflight),
            client.get("/v1/v1/page", headers=evil),
            *(client.get("/v1/page", headers={"sec-fetch-site": site}) for site in ("cross-site", "same-site")),
        ):
            assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        for site in ("same-origin", "none"):
            found = client.get("/v1/page", headers={"sec-fetch-site": site})
            assert found.status_code == 200 and found.headers["cache-control"] == "no-store"
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_name_that_only_a_star_allows_is_not_the_server_s_own(serve: Client) -> None:
    with serve(allowed_hosts=("*", "box.local")) as client:
        for host, status in (("evil.example", 403), ("box.local", 400), ("localhost", 400)):
            asked = {"host": host, "origin": f"http://{host}"}
            assert client.post("/v1/chat/completions", json={}, headers=asked).status_code == status, host
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 200


def test_text_and_namespaces_of_keys_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="show_text"):
        Settings(show_text=True, namespace_per_key=True)


# -- what is shown ---------------------------------------------------------------------------------


def test_what_a_picture_has(serve: Client, engine: Engine) -> None:
    with serve() as client:
        before = picture(client)["now"]
        chat(client, "a question that is long enough to be kept", {"x-onefold-conversation": "desk 1"})
        again = chat(client, "a question that is long enough to be asked again")
        found = picture(client)
        now, stats = found["now"], engine.cache.stats()
        assert now["budget"] == stats.budget_bytes and now["stored_tokens"] == stats.stored_tokens > 40
        assert sum(v for k, v in now.items() if k.startswith("purpose_")) == now["used"]
        assert now["finished"] == before["finished"] + 2 and now["weights"] > 0
        assert 0 < now["hits_1"] < 1 and now["first_token"] > 0 and now["conversation_tokens"] > 40
        assert now["evictable_tokens"] >= now["free_tokens"] > 0
        boxes = found["tree"]
        assert sum(b["bytes"] for b in boxes.values()) == stats.stored_tokens * stats.token_bytes
        assert len(boxes) == 3 and {b["where"] for b in boxes.values()} == {"m"}
        row = found["requests"][again.headers["x-request-id"]]
        for name in ("prompt", "matched", "cached", "restored", "remote"):
            assert row[name] == int(again.headers[f"x-onefold-{name}-tokens"])
        assert row["computed"] == row["prompt"] - row["cached"] > 0 and row["generated"] == 4 and not row["live"]
        assert row["finish"] == "length" and row["diverged"].startswith("token ")
        assert "desk 1" in {r["conversation"] for r in found["requests"].values()}
        assert found["disk"]["mode"] == found["remote"]["mode"] == "off"
        assert client.get("/v1/page", headers={"accept": "text/html"}).headers["content-type"] == "application/json"


def test_a_folder_is_shown_by_its_last_part(model: Path) -> None:
    with Engine(*onefold.load(model), model_id=f"{model}/", budget="64MB") as engine, listening(engine) as url:
        named = httpx.get(f"{url}/v1/models").json()["data"][0]["id"], httpx.get(f"{url}/health").json()["model"]
        assert {*named, httpx.get(f"{url}/v1/page").json()["server"]["model"]} == {model.name}
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": str(model)}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT).json()["model"] == model.name


def test_prompts_are_shown_only_if_the_server_was_told_to(serve: Client, engine: Engine) -> None:
    for show in (False, True):
        with serve(show_text=show) as client:
            engine.clear()
            chat(client, SECRET_TEXT + " first")
            chat(client, SECRET_TEXT + " other")
            found = picture(client)
            shown = json.dumps(found)
            nodes = [client.get(f"/v1/page/nodes/{n}").json() for n in found["tree"]]
            texts = "".join(node.get("text", "") for node in nodes)
            assert ("other" in shown) is show and (SECRET_TEXT in texts) is show
            assert all(("text" in node) is show for node in nodes)


def test_which_requests_computed_and_reused_a_node(serve: Client) -> None:
    with serve() as client:
        ids = [chat(client, f"what is said by all of them and by {i}").headers["x-request-id"] for i in "ab"]
        tree = picture(client)["tree"]
        (top,) = [n for n, box in tree.items() if not box["above"]]
        found = client.get(f"/v1/page/nodes/{top}").json()
        assert {r["id"]: r["did"] for r in found["requests"]} == {ids[0]: "computed", ids[1]: "reused"}
        assert found["tokens"] == found["path_tokens"] == tree[top]["end"]
        leaves = [n for n, box in tree.items() if box["above"]]
        own = [client.get(f"/v1/page/nodes/{n}").json()["requests"] for n in leaves]
        assert sorted(r["id"] for rows in own for r in rows) == sorted(ids)


def test_pin_unpin_and_forget(serve: Client, engine: Engine) -> None:
    with serve() as client:
        chat(client, "something that shall stay in memory")
        ((name, box),) = picture(client)["tree"].items()
        node = f"/v1/page/nodes/{name}"
        assert client.post(f"{node}/unpin").status_code == 409
        for _ in range(2):
            assert client.post(f"{node}/pin").json() == {"pinned_here": True}
        assert client.get(node).json()["pinned_here"] and picture(client)["tree"][name]["pins"] == 1
        engine.cache.inventory.shrink(0)
        assert len(engine.cache) == box["end"], "a pin keeps it"
        assert client.post(f"{node}/forget").json() == {"forgotten_tokens": 0}
        assert client.post(f"{node}/unpin").json() == {"pinned_here": False}
        assert client.post(f"{node}/forget").json() == {"forgotten_tokens": box["end"]}
        assert len(engine.cache) == 0
        for path in (node, "/v1/page/nodes/999999999"):
            gone = client.get(path)
            assert gone.status_code == 404 and "not held any more" in gone.json()["error"]["message"]
        assert client.post(f"{node}/pin").status_code == 404
        assert client.post(f"{node}/explode").status_code == 404
        engine.check()


def test_a_pin_ends_only_for_a_request_that_has_no_room_beside_it(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(*onefold.load(model), model_id="tiny", budget="16MB") as engine:
        settings = Settings(grace_seconds=0.5)
        with listening(engine, settings) as url, httpx.Client(base_url=url, timeout=WAIT) as client:
            most = engine.cache.inventory.most_tokens()

            def complete(n_tokens: int, first: int) -> None:
                body = {"prompt": [first, *range(5, 85)] * (n_tokens // 81), "max_tokens": 1}
                assert client.post("/v1/completions", json=body).status_code == 200

            complete(most * 6 // 10, 3)
            (name, *_) = picture(client)["tree"]
            client.post(f"/v1/page/nodes/{name}/pin")
            for first in (4, 86):
                complete(most // 4, first)
            assert client.get(f"/v1/page/nodes/{name}").json()["pinned_here"] is True
            assert "released" not in caplog.text
            complete(most * 9 // 10, 87)
            assert engine.cache.view.pins == 0 and "1 pinned prefixes are released" in caplog.text


def test_a_pin_of_the_page_ends_with_clear(serve: Client, engine: Engine) -> None:
    with serve() as client:
        chat(client, "something that shall stay in memory")
        (name,) = picture(client)["tree"]
        client.post(f"/v1/page/nodes/{name}/pin")
        client.delete("/v1/cache")
        assert len(engine.cache) == 0 and client.post(f"/v1/page/nodes/{name}/unpin").status_code == 409


def test_events_are_a_picture_and_what_changes(serve: Client) -> None:
    with serve() as client, client.stream("GET", "/v1/page/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()

        def event() -> tuple[str, Any]:
            name = next(line for line in lines if line.startswith("event: "))
            return name.removeprefix("event: "), json.loads(next(lines).removeprefix("data: "))

        name, drawn = event()
        assert name == "picture" and drawn["tree"] == {}
        asked = chat(client, "is this seen by those who look?").headers["x-request-id"]
        for _ in range(20):
            name, changed = event()
            assert name == "changes"
            if changed["set"].get("requests", {}).get(asked, {}).get("live") is False:
                return
    raise AssertionError("the request was not shown")


def test_the_log_does_not_show_the_time_of_a_viewer_as_that_of_a_request(
    serve: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "onefold.server"), serve() as client:
        with client.stream("GET", "/v1/page/events") as stream:
            next(stream.iter_lines())
        picture(client)
        client.post("/v1/page/events")
        lines = [record.getMessage() for record in caplog.records]
        wait_until(lambda: "/v1/page/events 200" in caplog.text, f"not one of them: {lines}")
    line = {message.partition(" id=")[0].rpartition(" ")[0]: message for message in caplog.messages}
    assert line.keys() == {"GET /v1/page/events 200", "GET /v1/page 200", "POST /v1/page/events 405"}
    for said, message in line.items():
        assert (" open=" in message) is ("events 200" in said) is (" seconds=" not in message), message


def test_a_viewer_does_not_hold_up_the_end(engine: Engine) -> None:
    from starlette.testclient import TestClient

    from onefold.server.app import make_app

    leaving = threading.Event()
    with (
        TestClient(make_app(engine, Settings(), leaving), base_url="http://127.0.0.1") as client,
        client.stream("GET", "/v1/page/events") as stream,
    ):
        leaving.set()
        assert sum(1 for line in stream.iter_lines() if line.startswith("event: ")) <= 2


def test_requests_that_fail_and_that_were_refused_are_listed(serve: Client) -> None:
    with serve() as client:
        failed = client.post("/v1/chat/completions", json={"messages": "no"})
        row = picture(client)["requests"][failed.headers["x-request-id"]]
        assert row["status"] == 400 and row["live"] is False and "prompt" not in row
        client.get("/v1/models")
        assert all(r["path"].startswith("/v1/") for r in picture(client)["requests"].values())


def test_requests_without_a_key_take_nobody_s_place(serve: Client) -> None:
    with serve(api_keys=("secret",)) as client:
        asked = chat(client, "one that was let in", KEY).headers["x-request-id"]
        for headers in ({}, {"host": "evil.example"}, KEY | {"origin": "http://evil.example"}):
            assert client.post("/v1/chat/completions", json={}, headers=headers).status_code in (401, 403)
        assert list(picture(client, headers=KEY)["requests"]) == [asked]


def test_holders_of_keys_see_nothing_of_other_keys(serve: Client) -> None:
    other = {"authorization": "Bearer other", "x-onefold-conversation": "secret plans"}
    with serve(api_keys=("secret", "other"), namespace_per_key=True) as client:
        chat(client, "in a namespace of its own", KEY)
        chat(client, "in another one", other)
        found = picture(client, headers=KEY)
        assert sorted(filter(None, found["spaces"].values())) == ["namespace 1", "namespace 2"]
        assert "secret plans" not in json.dumps(found)
        for name in found["tree"]:
            assert client.get(f"/v1/page/nodes/{name}", headers=KEY).json()["space"] in found["spaces"].values()


def test_with_text_the_words_of_several_keys_are_on_the_page_and_not_in_answers(serve: Client) -> None:
    with serve(api_keys=("secret", "other"), show_text=True) as client:
        chat(client, "all of them begin alike: rhubarb", KEY)
        asked = chat(client, "all of them begin alike: strawberries", {"authorization": "Bearer other"})
        assert ": known " in picture(client, headers=KEY)["requests"][asked.headers["x-request-id"]]["diverged"]
        assert "known" not in asked.headers["x-onefold-diverged"]


def test_what_a_shared_store_has_and_gave(model: Path, tmp_path: Path) -> None:
    from onefold.cache.tiers.remote.tier import RemoteSettings

    remote = RemoteSettings(f"file://{tmp_path}/store", deadline=30.0, write="all")
    with Engine(*onefold.load(model), model_id="tiny", budget="64MB", remote=remote) as engine:
        body = {"prompt": [5 + i % 80 for i in range(600)], "max_tokens": 1}
        with listening(engine, Settings(grace_seconds=0.5)) as url, httpx.Client(base_url=url, timeout=WAIT) as client:
            assert client.post("/v1/completions", json=body).status_code == 200
            assert engine.cache.flush(60)
            found = picture(client)
            (name,) = found["tree"]
            assert 400 < found["tree"][name]["shared"] <= 600 and found["tree"][name]["where"] == "m"
            assert client.get(f"/v1/page/nodes/{name}").json()["shared_tokens"] == found["tree"][name]["shared"]
            assert found["remote"]["hits"] == 0 and found["remote"]["reasons"] == {} and found["remote"]["records"] > 0


def test_requests_that_read_from_a_tier_are_counted() -> None:
    history = History()
    for restored, remote in ((0, 0), (50, 0), (0, 50), (20, 30)):
        read = Record("POST", "/v1/messages")
        read.note(0, Started(Hit(100, 60, 60, restored=restored, remote=remote)))
        history.ended(read)
    assert (history.from_disk, history.from_remote) == (2, 2)


def test_a_request_began_once(serve: Client) -> None:
    with serve() as client:
        asked = chat(client, "when did it begin?").headers["x-request-id"]
        began = [picture(client)["requests"][asked]["began"] for _ in range(3)]
        assert len(set(began)) == 1


def test_a_program_that_asks_again_and_again_does_not_draw_again_and_again(engine: Engine) -> None:
    page = Page(engine, History(), show_text=False, may_change=False)
    drawn: list[int] = []
    outline = engine.cache.view.outline

    def slow() -> Any:
        drawn.append(1)
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return outline()

    engine.cache.view.outline = slow  # type: ignore[method-assign]
    try:
        for _ in range(5):
            page.picture(now=True)
    finally:
        del engine.cache.view.outline
    assert len(drawn) == 1


def test_speeds_are_not_negative_if_two_draw_at_once(engine: Engine) -> None:
    page = Page(engine, History(), show_text=False, may_change=False)
    stats, began, shown = engine.stats, threading.Event(), []

    def slow() -> Any:
        found = stats()
        if not began.is_set():
            began.set()
            time.sleep(1.0)
        return found

    engine.stats = slow  # type: ignore[method-assign]
    try:
        first = threading.Thread(target=lambda: shown.append(page.picture()))
        first.start()
        assert began.wait(WAIT)
        with listening(engine, Settings(grace_seconds=0.5)) as url, httpx.Client(base_url=url, timeout=WAIT) as client:
            chat(client, "tokens that are counted meanwhile")
        shown.append(page.picture())
        first.join()
    finally:
        del engine.stats
    for drawn in shown:
        assert (drawn["now"]["prefilled_per_second"] or 0) >= 0 and (drawn["now"]["tokens_per_second"] or 0) >= 0


def test_the_end_of_the_last_viewer_waits_for_nobody_who_draws(engine: Engine) -> None:
    page = Page(engine, History(), show_text=False, may_change=False)
    inside, go_on = threading.Event(), threading.Event()
    outline = engine.cache.view.outline
    engine.cache.view.outline = lambda: inside.set() or (go_on.wait(WAIT) and outline())  # type: ignore[method-assign]
    drawing = threading.Thread(target=page.picture)
    try:
        drawing.start()
        assert inside.wait(WAIT)
        page.rest()  # it returns, though somebody draws
        assert drawing.is_alive()
    finally:
        go_on.set()
        drawing.join()
        del engine.cache.view.outline


def test_nothing_runs_when_nobody_looks(serve: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    outline = engine.cache.view.outline
    monkeypatch.setattr(engine.cache.view, "outline", lambda: drawn.append(1) or outline())
    with serve() as client:
        chat(client, "nobody looks")
        assert drawn == []
        with client.stream("GET", "/v1/page/events") as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("event: "))
        for _ in range(40):
            at = len(drawn)
            threading.Event().wait(1.5)  # longer than between two pictures
            if len(drawn) == at:
                break
        assert len(drawn) == at >= 1
