"""The public surface: what objects say of themselves, what the documents promise, and errors of our own."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from driving import forward, turn
from fake import FakeModel, Session, text
from tiny import tiny, with_unknown_caches

import onefold
from onefold.cache.memory.tokens import Tokens, frozen
from onefold.cache.memory.tree import Match, Node, Tree
from onefold.engine.loading import model_name
from onefold.errors import ConfigError
from onefold.mlx_lm import LRUPromptCache, install

ROOT = Path(__file__).resolve().parents[1]
CALLS = {
    "lease": onefold.PrefixCache.lease,
    "PrefixCache": onefold.PrefixCache,
    "generate": onefold.stream_generate,
    "stream_generate": onefold.stream_generate,
    "commit": onefold.Lease.commit,
    "flush": onefold.PrefixCache.flush,
    "clear": onefold.PrefixCache.clear,
    "restore": onefold.PrefixCache.restore,
}


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.name)
def test_documents_name_keywords_that_exist(path: Path) -> None:
    wrong = []
    for name, arguments in re.findall(r"\b(\w+)\(([^()`]*)\)", path.read_text()):
        if name in CALLS:
            known = set(inspect.signature(CALLS[name]).parameters) | {"max_tokens", "verbose"}
            wrong += [f"{name}({k}=)" for k in re.findall(r"\b(\w+)=", arguments) if k not in known]
    assert not wrong


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(onefold.__file__).parent / "py.typed").is_file()


def test_every_public_name_can_be_had() -> None:
    assert sorted(onefold.__all__) == sorted(set(onefold.__all__))
    for name in onefold.__all__:
        assert getattr(onefold, name).__name__ == name
        assert getattr(onefold, name).__doc__ or issubclass(getattr(onefold, name), Exception)


def test_a_cache_and_a_lease_show_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "16MB") as cache:
        assert repr(cache) == "<PrefixCache of llama.Model, 0 B of 16.0 MB held>"
        assert len(cache) == 0 and cache
        tokens = turn(cache, model, list(range(40)))[1]
        assert cache.nbytes == cache.inventory.held_bytes > 0
        assert len(cache) == len(tokens)
        with cache.lease([*tokens, 1]) as lease:
            assert repr(lease) == f"<Lease of {len(tokens) + 1} tokens, {len(tokens)} cached, at {len(tokens)}>"
            assert len(lease) == len(tokens)
            assert lease.nbytes == cache.nbytes  # it continues in the buffer that holds them
            with cache.lease([*tokens, 2]) as reader:
                assert reader.nbytes == 0  # it only reads so far
    assert repr(cache) == "<PrefixCache, closed>"
    with onefold.PrefixCache(with_unknown_caches(monkeypatch), "16MB") as cache:
        assert "uncached: cache class Listing" in repr(cache)


def test_what_else_is_handed_out_shows_itself() -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "16MB") as cache:
        tokens = turn(cache, model, list(range(40)))[1]
        pin = cache.pin(tokens)
        assert repr(pin) == f"<Pin of {len(tokens)} tokens>"
        pin.release()
        assert repr(pin) == f"<Pin of {len(tokens)} tokens, released>"
        with cache.lease([1]) as lease:
            assert repr(lease) == "<Lease of 1 token, 0 cached, at 0>"
            assert repr(cache.batch([lease])) == "<Batch of 1 row of llama.Model>"
            assert repr(cache.batch([])) == "<Batch of 0 rows of llama.Model>"
        assert (cache.kv, cache.max_kv_size, cache.keep) == ("16", None, 0)
    prompts = LRUPromptCache(max_size=4, max_bytes="8GB", model=model)
    assert repr(prompts) == "<LRUPromptCache, 0 of 4 entries, 0 tokens, at most 8.0 GB>"
    layers, rest = prompts.fetch_nearest_cache("key", [1, 2, 3])
    model(mx.array([rest]), cache=layers)
    prompts.insert_cache("key", rest, layers)
    assert repr(prompts) == "<LRUPromptCache, 1 of 4 entries, 3 tokens, at most 8.0 GB>"
    prompts.close()
    assert repr(prompts) == "<LRUPromptCache, closed>"
    with install(max_size=3) as installed:
        assert repr(installed) == "<Installed: LRUPromptCache(max_size=3)>"
    assert repr(installed) == "<Installed, uninstalled>"


def test_a_row_that_is_not_there_is_a_lease_error() -> None:
    model = tiny("llama")
    with (
        onefold.PrefixCache(model, "16MB") as cache,
        cache.lease([1, 2, 3]) as one,
        cache.lease([4, 5, 6]) as other,
    ):
        batch = cache.batch([one])
        with pytest.raises(onefold.LeaseError, match="not a row"):
            batch.remove(other)
        assert batch.leases == [one]
        batch.remove(one)
        with pytest.raises(onefold.LeaseError, match="not a row"):
            batch.remove(one)


def test_rotation_is_logged_once_with_the_conversation_s_length(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    with caplog.at_level(logging.WARNING, "onefold"), onefold.PrefixCache(model, "16MB", max_kv_size=32) as cache:
        for first in range(3):
            tokens: list[Any] = [first, *range(50)]
            with cache.lease(tokens) as lease:
                forward(model, lease.layers, tokens, 0, grid=40)
        assert cache.stats().reasons["rotated"] == 3
    said = [r.getMessage() for r in caplog.records if "max_kv_size" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("a conversation of 40 tokens outgrows max_kv_size=32")
    assert "stats().reasons['rotated']" in said[0] and "GET /v1/cache" in said[0]


def test_one_walk_of_the_tree_before_the_first_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a server asks of a request's tokens before it has a lease, and the lease itself: the tree is walked
    once, as long as it does not change."""
    model = FakeModel(("full", "full"))
    with onefold.PrefixCache(model, "8MB", disk=tmp_path) as cache:
        known = Session(model, cache, text(200)).prefill(50).commit()
        asked = frozen(np.array([*known, 1], np.int32))
        walks, walk = [], Tree._walk

        def counted(tree: Tree, tokens: Tokens, node: Node) -> Match:
            walks.append(len(tokens))
            return walk(tree, tokens, node)

        monkeypatch.setattr(Tree, "_walk", counted)
        assert cache.inventory.matched(asked) == cache.inventory.in_memory(asked) == len(known)
        assert len(cache.inventory.continuation(asked)) == 0
        assert cache.restore(asked) is None
        with cache.lease(asked, after=[]) as lease:
            assert lease.cached == len(known) and lease.tokens is asked
            assert walks == [len(asked)]


def test_a_callers_own_read_only_array_may_be_changed_later() -> None:
    model = tiny("llama")
    known, other = [(j * 7) % 100 for j in range(100)], [(j * 3 + 1) % 100 for j in range(102)]
    with onefold.PrefixCache(model, "64MB") as cache:
        with cache.lease(known) as lease:
            mx.eval(model(mx.array([known]), cache=lease.layers))
            lease.commit()
        buffer = np.array([*known, 5, 6], np.int32)
        view = buffer[:]
        buffer.flags.writeable = False
        with cache.lease(buffer) as lease:
            assert lease.cached == 100
            view[:] = other  # the caller uses its buffer for the next request
            assert lease.tokens[:100].tolist() == known
            lease.cancel()
        assert cache.inventory.matched(buffer) == 0
        with cache.lease(buffer) as lease:
            assert lease.matched == lease.cached == 0


def test_a_lease_takes_any_iterable_of_restores() -> None:
    with onefold.PrefixCache(tiny("llama"), "64MB") as cache:
        with cache.lease([1, 2, 3], after=iter([])) as lease:
            assert lease.cached == 0
        with cache.lease([1, 2, 3], after=()) as lease:
            assert lease.cached == 0


def test_an_unknown_keyword_is_the_first_that_was_given() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        onefold.PrefixCache(tiny("llama"), "64MB", bogus=1, abc=2)  # type: ignore[call-arg]


def test_a_subclass_has_a_signature_of_its_own() -> None:
    class Mine(onefold.PrefixCache):
        def __init__(self, a: int, b: int = 2) -> None: ...

    assert list(inspect.signature(Mine).parameters) == ["a", "b"]
    assert list(inspect.signature(onefold.PrefixCache.__init__).parameters)[:3] == ["self", "model", "budget"]


@pytest.mark.parametrize(
    "given, name",
    [
        ("demo", "demo"),
        ("./demo", "demo"),
        ("org/name", "org/name"),
        ("models/foo", "foo"),
        ("models/foo/", "foo"),
        ("models/foo/../foo/.", "foo"),
        ("~/models/foo", "foo"),
        ("~", "home"),
        ("models/latest", "latest"),
        ("~nobody-of-this-name/foo", "~nobody-of-this-name/foo"),
        ("", ""),
    ],
)
def test_a_folder_is_called_by_its_last_part_and_what_is_none_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, name: str
) -> None:
    home = tmp_path / "home"
    for folder in ("models/foo", "demo"):
        (home / folder).mkdir(parents=True)
    (home / "models/latest").symlink_to("foo")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    assert model_name(given) == name
    monkeypatch.chdir("models/foo")
    assert model_name(".") == "foo" and model_name("..") == "models"


def test_a_home_that_is_not_there_is_a_refusal() -> None:
    with pytest.raises(ConfigError, match='there is no folder "~nobody-of-this-name/foo"'):
        onefold.load("~nobody-of-this-name/foo")
