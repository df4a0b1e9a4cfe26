"""Whatever a record holds is compared with the model before a layer sees it, and by `verify`, which has no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_caches import files, opened, turn
from fake import FakeModel, Session, settled, text
from test_disk import HYBRID

from onefold.cache.tiers.records import record as form
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.record import Content, Tensor, What
from onefold.cli.cache import run
from onefold.errors import RecordError

KINDS = {"hybrid": HYBRID, "chunked": ("full", "chunked"), "keep": ("rotating_keep", "composite")}


def filled(kinds: tuple[str, ...], folder: Path) -> tuple[FakeModel, list[int]]:
    model = FakeModel(kinds)
    with opened(model, folder) as cache:
        return model, turn(model, cache, text(100))


def content_at(path: Path) -> tuple[Content, bytes]:
    data, named = path.read_bytes(), form.parse_name(path.name)
    head = form.parse_head(data)
    assert isinstance(head, form.Head) and named is not None
    content = form.content_of(head, path.parent.name, named)
    return content, data[head.data_at + content.tokens.nbytes :]


def points(folder: Path) -> list[Path]:
    return [p for p in files(folder) if ".point." in p.name]


def forge(path: Path, tensors: list[Tensor], state: Any = None) -> None:
    """In the place of a record, one that is sound by itself and holds these; the bytes are zeros."""
    old, _ = content_at(path)
    said = old.state if state is None else json.dumps(state, separators=(",", ":"))
    new = Content(old.what, old.namespace, old.parent, old.start, old.tokens, tuple(tensors), said)
    payload = bytes(sum(t.nbytes for t in tensors))
    path.unlink()
    header = new.header(new.checksum([payload]))
    path.with_name(new.name).write_bytes(header + new.tokens.astype("<i4").tobytes() + payload)


def another_type(tensors: list[Tensor]) -> list[Tensor]:
    return [t._replace(dtype="I32" if t.dtype == "F32" else "F32") for t in tensors]


def another_shape(tensors: list[Tensor]) -> list[Tensor]:
    return [t._replace(shape=(*t.shape[:-1], t.shape[-1] * 2)) for t in tensors]


def other_heads(tensors: list[Tensor]) -> list[Tensor]:
    return [t._replace(shape=(t.shape[0], t.shape[1] + 1, *t.shape[2:])) for t in tensors]


def more_rows(tensors: list[Tensor]) -> list[Tensor]:
    return [t._replace(shape=(2, *t.shape[1:])) for t in tensors]


def flat(tensors: list[Tensor]) -> list[Tensor]:
    return [t._replace(shape=(t.nbytes // form.ITEM_BYTES[t.dtype],)) for t in tensors]


def fewer_entries(tensors: list[Tensor]) -> list[Tensor]:
    return [t._replace(shape=(*t.shape[:2], t.shape[2] - 1, t.shape[3])) if len(t.shape) == 4 else t for t in tensors]


FORGERIES = (another_type, another_shape, other_heads, more_rows, flat, fewer_entries)


@pytest.mark.parametrize(
    ("kinds", "forged"),
    [*(("hybrid", f) for f in FORGERIES), ("chunked", fewer_entries), ("chunked", another_type), ("keep", other_heads)],
)
def test_a_checkpoint_that_does_not_fit_is_damaged(
    kinds: str,
    forged: Callable[[list[Tensor]], list[Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, said = filled(KINDS[kinds], tmp_path)
    n = len(points(tmp_path))
    for path in points(tmp_path):
        forge(path, forged(list(content_at(path)[0].tensors)))
    assert run(["verify", "--json", "--disk", str(tmp_path)]) == 1
    assert [b["reason"] for b in json.loads(capsys.readouterr().out)["bad"]] == ["of another layout"] * n
    with opened(model, tmp_path) as cache:
        session = Session(model, cache, [*said, *text(5, 3)])
        session.prefill().decode(1).cancel()
        assert cache.stats().reasons["disk: of another layout"] == n, "all of them, each once"
        assert points(tmp_path) == [] or cache.flush(10)
        settled(cache)
    assert run(["verify", "--disk", str(tmp_path)]) == 0


def states(said: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to say that other things are the state, with the same tensors."""
    at = next(i for i, leaf in enumerate(said["leaves"]) if leaf is not None)
    yield "one leaf more", said | {"leaves": [*said["leaves"], None]}
    yield "one leaf less", said | {"leaves": [x for i, x in enumerate(said["leaves"]) if i or x is not None]}
    window = next(i for i, leaf in enumerate(said["leaves"]) if leaf is not None and leaf["extra"])
    for name, change in {
        "another window": {"extra": [0, 7]},
        "no window": {"extra": []},
        "another end": {"end": 3},
        "nonsense": {"end": "x"},
    }.items():
        leaves = list(said["leaves"])
        leaves[window] = leaves[window] | change
        yield name, said | {"leaves": leaves}
    yield "another position", said | {"position": said["position"] - 1}
    yield "no leaves", {"position": said["position"]}
    yield "slots", said | {"leaves": [None if i == at else x for i, x in enumerate(said["leaves"])]}


def test_a_state_that_is_told_wrongly_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(HYBRID, tmp_path)
    path = points(tmp_path)[-1]
    content, _ = content_at(path)
    about = json.loads((path.parent / "about.json").read_text())
    layout = Layout.of(about)
    layout.require(content)
    for name, state in states(json.loads(content.state)):
        lying = Content(
            content.what, content.namespace, content.parent, content.start, content.tokens, content.tensors,
            json.dumps(state),
        )  # fmt: skip
        with pytest.raises(RecordError):
            layout.require(lying)
            pytest.fail(name)


def test_a_leaf_that_is_left_out_is_damaged(tmp_path: Path) -> None:
    """As if its state were the KV of the ranges."""
    model, said = filled(HYBRID, tmp_path)
    for path in points(tmp_path):
        content, _ = content_at(path)
        state = json.loads(content.state)
        state["leaves"][1] = None
        forge(path, [t for t in content.tensors if not t.name.startswith("state.1.")], state)
    with opened(model, tmp_path) as cache:
        session = Session(model, cache, [*said, 1])
        assert session.cached == 0 and cache.stats().reasons["disk: of another layout"] >= 1
        session.prefill().commit()


@pytest.mark.parametrize("kv", ["16", "8", "4"])
def test_a_bounded_conversation_is_compared_too(kv: str, tmp_path: Path) -> None:
    model, bound = FakeModel(("full", "full"), dim=64), (48, 4)
    options = {"max_kv_size": 48, "keep": 4, "kv": kv}
    with opened(model, tmp_path, **options) as cache:
        said = turn(model, cache, text(40), 30, bound=bound, kv=kv)
    with opened(model, tmp_path, **options) as cache:
        assert Session(model, cache, [*said, 1], bound=bound, kv=kv).cached == len(said)
    for path in points(tmp_path):
        forge(path, another_type(list(content_at(path)[0].tensors)))
    with opened(model, tmp_path, **options) as cache:
        session = Session(model, cache, [*said, 1], bound=bound, kv=kv)
        assert session.cached < len(said) and cache.stats().reasons["disk: of another layout"] >= 1


def test_attributes_of_a_models_own_class_are_compared() -> None:
    told = [{"in_ranges": False, "slots": {"kv": [["float32", [1, None, 8]]], "sums": [["float32", [1, 4]]]}}]
    layout = Layout([], json.loads(json.dumps(told)))

    def point(names: list[str], *tensors: tuple[str, tuple[int, ...]]) -> Content:
        leaf = {"start": 0, "end": 5, "extra": [], "slots": [True] * len(tensors), "names": names, "others": {}}
        made = tuple(Tensor(f"state.0.{j}", *t) for j, t in enumerate(tensors))
        state = json.dumps({"position": 5, "leaves": [leaf]})
        return Content(What.POINT, "0" * 32, b"p" * 20, 5, form.np.empty(0, "i4"), made, state)

    layout.require(point(["kv", "sums"], ("F32", (1, 9, 8)), ("F32", (1, 4))))
    layout.require(point(["sums"], ("F32", (1, 4))))
    for wrong in (
        point(["sums", "kv"], ("F32", (1, 9, 8)), ("F32", (1, 4))),
        point(["kv"], ("F32", (1, 9, 9))),
        point(["kv"], ("F16", (1, 9, 8))),
        point(["other"], ("F32", (1, 4))),
        point(["kv", "sums"], ("F32", (1, 9, 8))),
    ):
        with pytest.raises(RecordError):
            layout.require(wrong)


# -- folders from before ---------------------------------------------------------------------------


def test_a_namespace_from_before_can_be_used_and_verify_says_what_it_did_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, said = filled(HYBRID, tmp_path)
    (path,) = tmp_path.glob("*/about.json")
    about = json.loads(path.read_text())
    earlier = {k: v for k, v in about.items() if k not in ("points", "namespace")}
    path.write_text(json.dumps(earlier, indent=1))
    n = len(points(tmp_path))
    assert run(["verify", "--json", "--disk", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["not_compared"] == {path.parent.name: n}
    assert run(["verify", "--disk", str(tmp_path)]) == 0
    assert f"{n} records could not be compared with the model" in capsys.readouterr().out
    with opened(model, tmp_path) as cache:
        session = Session(model, cache, [*said, *text(5, 3)])
        assert session.cached == len(said)
        session.prefill().commit()
    assert json.loads(path.read_text()) == about, "from the next record on it is told in full"
    assert run(["verify", "--json", "--disk", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["not_compared"] == {}


def test_without_a_description_nothing_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(HYBRID, tmp_path)
    (path,) = tmp_path.glob("*/about.json")
    path.unlink()
    assert run(["verify", "--json", "--disk", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["not_compared"] == {path.parent.name: len(files(tmp_path))}


def test_a_cache_goes_by_its_model_and_not_by_what_is_written_there(tmp_path: Path) -> None:
    model, said = filled(HYBRID, tmp_path)
    (path,) = tmp_path.glob("*/about.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"points": [], "layout": []}))
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*said, 1]).cached == len(said)


def test_the_description_tells_of_every_leaf(tmp_path: Path) -> None:
    model = FakeModel(("full", "rotating_keep", "chunked", "recurrent"))
    with opened(model, tmp_path) as cache:
        told = json.loads(json.dumps(cache.parts.models.describe()))
    assert [leaf["in_ranges"] for leaf in told] == [True, False, False, False]
    assert told[1]["slots"] == [[["float32", [1, 2, "entries", 8]]]] * 2 and len(told[3]["slots"]) == 2
