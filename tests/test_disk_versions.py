"""Records of format 1 and of format 2 in one folder, and where the tensors of format 2 begin in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from disk_caches import files, opened, small_records, turn
from fake import FakeModel, Session, settled, text
from safetensors import safe_open
from test_disk import HYBRID
from test_tiers import SPACE, payload_of, put, tokens

from onefold.cache.tiers.records import heads
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.entry import NO_TOKENS
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.record import (
    PAGE,
    PAGED_FROM,
    Content,
    Tensor,
    What,
    content_of,
    parse_head,
    parse_name,
)
from onefold.cli.cache import run
from onefold.errors import RecordError

KINDS = {"full": ("full", "full"), "hybrid": HYBRID}
OF_FORMAT_1 = re.compile(r"([0-9]{8}|[1-9][0-9]{8,9})-([0-9a-f]{40})\.(range|point)\.safetensors")
"""The names that 0.6.0 takes for records."""


def large(n: int = 65, n_bytes: int = PAGED_FROM, *, version: int = 2, layers: int = 1) -> Content:
    """A range whose tensors have so many bytes."""
    kv = [Tensor(f"kv.{i}.0", "U8", (1, 1, n_bytes // layers)) for i in range(layers)]
    return Content(What.RANGE, SPACE, b"", 0, tokens(n), tuple(kv), version=version)


def begins_at(path: Path) -> int:
    """Where a file's first tensor after the tokens begins."""
    data = path.read_bytes()
    head, named = parse_head(data), parse_name(path.name)
    assert not isinstance(head, int) and named is not None
    assert content_of(head, path.parent.name, named).size == len(data)
    return head.data_at + head.tokens.nbytes


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 4089, 4090, 20_000])
@pytest.mark.parametrize("layers", [1, 512])
def test_the_tensors_of_a_large_record_begin_at_a_multiple_of_16_kib(n: int, layers: int, folder: Folder) -> None:
    made = large(n, layers=layers)
    path = put(folder, made)
    assert begins_at(path) % PAGE == 0
    assert made.size - made.payload_bytes - len(json.dumps(json.loads(made.header()[8:]))) < PAGE
    with safe_open(path, framework="numpy") as found:  # the plain library
        assert (found.get_tensor("tokens") == made.tokens).all()
        first = found.get_tensor("kv.0.0").tobytes()
        assert first == payload_of(made)[: len(first)] and len(found.keys()) == layers + 1


def test_a_large_checkpoint_is_aligned_too(folder: Folder) -> None:
    state = Tensor("state.0.0", "U8", (PAGED_FROM,))
    path = put(folder, Content(What.POINT, SPACE, b"p" * 20, 7, NO_TOKENS, (state,), "{}"))
    assert begins_at(path) == PAGE


@pytest.mark.parametrize("made", [large(n_bytes=PAGED_FROM - 1), large(version=1)])
def test_other_records_are_padded_to_64_bytes(made: Content, folder: Folder) -> None:
    put(folder, made)
    header = made.header()
    assert len(header) % 64 == 0 and len(header) - len(header.rstrip()) < 64 and len(header) < 1024


def test_a_padded_head_is_read_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read for each record, and no JSON."""
    made = large()
    put(folder, made)
    (filed,) = folder.listing(SPACE).records
    monkeypatch.setattr(heads, "read_head", lambda *_: pytest.fail("it was looked at closely"))
    with folder.opening(SPACE) as opens:
        file = opens(made.name)
        said = heads.read_said(file, SPACE, filed.named, filed.size)
    assert (said.tokens == made.tokens).all() and not said.hollow


def test_a_name_and_a_header_of_different_formats_do_not_agree(folder: Folder) -> None:
    made = large()
    path = put(folder, made)
    path.rename(path.with_name(path.name.replace(".2.", ".")))
    catalog = Catalog(folder, 10**9)
    assert catalog.load(SPACE) == [] and catalog.reasons == {"misnamed": 1}
    head = parse_head(made.header() + made.tokens.tobytes())
    assert not isinstance(head, int)
    with pytest.raises(RecordError, match="misnamed"):
        content_of(head, SPACE, parse_name(large(version=1).name))  # type: ignore[arg-type]


def test_an_earlier_version_takes_no_new_name_for_a_record() -> None:
    """So it leaves the file alone."""
    assert OF_FORMAT_1.fullmatch(large(version=1).name) and not OF_FORMAT_1.fullmatch(large().name)
    assert parse_name(large().name.replace(".2.", ".3.")) is None


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_of_format_1_goes_on_in_format_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel(KINDS[name])
    with opened(model, tmp_path) as cache:
        small_records(cache, 40)
        cache.parts.tier.spiller.jobs.version = 1
        said = turn(model, cache, text(100))
    old = set(files(tmp_path))
    assert old and all(OF_FORMAT_1.fullmatch(p.name) for p in old)
    for _ in range(2):
        with opened(model, tmp_path) as cache:
            small_records(cache, 40)
            assert cache.durable(said) == len(said)
            session = Session(model, cache, [*said, 1])  # every layer is compared with a fresh run
            assert session.cached == len(said) and session.lease.restored > 0
            said = session.prefill().decode(50).commit()
            assert cache.flush(10, everything=True) and cache.durable(said) == len(said)
            assert cache.stats().disk.rejected_records == 0
            settled(cache)
    new = set(files(tmp_path)) - old
    assert new and all(".2." in p.name for p in new)
    ranges = {p for p in old if ".range." in p.name}
    assert ranges <= set(files(tmp_path)), "they are continued, not written again"
    assert run(["verify", "--json", "--disk", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bad"] == [] and told["of_another_format"] == []
    assert run(["prune", "--older-than", "0s", "--disk", str(tmp_path)]) == 0
    assert files(tmp_path) == []


def test_a_record_of_format_1_that_no_node_had_is_not_written_again(tmp_path: Path) -> None:
    model = FakeModel(("full", "full"))
    with opened(model, tmp_path, disk_mode="through") as cache:
        jobs = cache.parts.tier.spiller.jobs
        jobs.version = 1
        turn(model, cache, text(60))
        assert cache.flush(10)
        jobs.version = 2
        (record,) = cache.parts.tier.catalog.records()
        assert record.version == 1
        with cache.state.lock:
            (node,) = record.nodes
            node.below = None
            record.nodes.discard(node)
            cache.parts.tier.committed(node)
        assert cache.flush(10) and len(files(tmp_path)) == 1 and record.nodes == {node}
