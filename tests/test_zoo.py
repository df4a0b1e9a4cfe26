"""Every architecture of mlx-lm is known, listed and tried: the record, the table of docs/models.md, and the trial
itself on families that tests/test_models.py has not. All of them stand the trial in `make models`."""

from __future__ import annotations

import importlib.metadata
import sys
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import pytest
import zoo
from effort import quick
from tiny import tiny
from trial import DIFFERS, Failed, Trial

import onefold
from onefold.cache.model.fingerprint import model_digest
from onefold.cache.model.kinds.recurrent import RecurrentLayer
from onefold.cache.model.kinds.rotating import RotatingLayer

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "models.md"

MATTER = {
    "baichuan_m1": "composites of recurrent states with full attention and with windows",
    "deepseek_v41": "a cache class of the model's own",
    "kimi_linear": "MLA and delta nets",
    "minimax_m3_vl": "an indexer beside full attention, in some layers only; keys without values",
    "recurrent_gemma": "windows and recurrent states, and nothing that could be cut",
}

DISTURBED = {
    "llama": "dense",
    "llama_sliding": "sliding",
    "mamba2": "recurrent",
    "falcon_h1": "composite",
    "deepseek_v3": "MLA",
}


@pytest.fixture(autouse=True)
def uncompiled():
    """Compiling each of many small models takes longer than running it."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@cache
def rows() -> dict[str, list[str]]:
    found = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| architecture"):
            name, *cells = (c.strip() for c in line.strip().strip("|").split("|"))
            assert name not in found, f"{name} has two rows"
            found[name] = cells
    return found


# -- the record -------------------------------------------------------------------------------


def test_every_installed_architecture_is_in_the_record_or_would_be_called_new() -> None:
    installed = set(zoo.installed())
    assert len(installed) > 100
    assert {"llama", "qwen3_next", "lfm2-vl", "solar_open"} <= installed
    assert not installed & {"base", "cache", "switch_layers", "rope_utils", "ssm"}
    assert zoo.OWN.keys() | zoo.LEFT_OUT.keys() | zoo.STANDS_IN.keys() <= zoo.KNOWN


def test_a_module_that_nobody_has_looked_at_is_new_and_tried(tmp_path, monkeypatch) -> None:
    """What a release of mlx-lm would bring: here a module that takes over another one's model."""
    (tmp_path / "quux5_moe.py").write_text("from mlx_lm.models.qwen3_moe import Model, ModelArgs\n")
    (tmp_path / "quux_layers.py").write_text("class Quux: ...\n")
    monkeypatch.setattr(mlx_lm.models, "__path__", [*mlx_lm.models.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import models

    try:
        assert set(zoo.installed()) - zoo.KNOWN == {"quux5_moe"}
        row = models.examine("quux5_moe")
    finally:
        sys.modules.pop("mlx_lm.models.quux5_moe", None)
    assert row.remarks.startswith("new")
    assert row.trial == "passed" and row.reuse == "shared in place" and row.ok
    assert "| quux5_moe | 2 full | shared in place | together | passed | new" in models.page([row], [])


def test_what_is_recorded_and_not_installed_is_gone(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import models

    monkeypatch.setattr(zoo, "KNOWN", zoo.KNOWN | {"quux4"})
    assert [(r.name, r.remarks.split(":")[0]) for r in models.gone()] == [("quux4", "gone")]


def test_one_that_cannot_be_built_says_why_and_fails(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import models

    monkeypatch.setitem(zoo.OWN, "llama", {"num_attention_heads": "four"})
    row = models.examine("llama")
    assert not row.constructed and not row.ok
    assert row.trial == "not constructed" and "Error" in row.remarks
    assert not models.as_it_should_be([row])


# -- the table ----------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_known_architecture() -> None:
    assert zoo.KNOWN - rows().keys() == set()
    assert all(len(cells) == 5 and all(cells) for cells in rows().values())
    if f"mlx-lm {importlib.metadata.version('mlx-lm')}," in TABLE.read_text():
        assert rows().keys() == zoo.KNOWN | set(zoo.installed())


def test_what_the_table_leaves_out_has_a_reason() -> None:
    for name, (_, reuse, batched, trial, remarks) in rows().items():
        if reuse == "uncached" or trial != "passed":
            assert name in zoo.LEFT_OUT, name
            assert zoo.LEFT_OUT[name] in remarks
        assert batched in (["—"] if reuse == "uncached" else ["together", "singly"]), name
    reused = [name for name, (_, reuse, _, trial, _) in rows().items() if reuse != "uncached" and trial == "passed"]
    assert len(reused) >= 0.95 * len(rows())


# -- the trial ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MATTER)
def test_it_stands_the_trial(name: str) -> None:
    report = Trial(zoo.model(name)).run()
    assert not report.failures
    assert len(report.outcomes) == 10
    assert not report.uncached and not report.defect


@pytest.mark.parametrize(
    "name",
    quick(sorted(zoo.KNOWN - zoo.LEFT_OUT.keys()), "afm7", "deepseek_v3", "gemma3n", "jamba", "mistral3", "smollm3"),
)
def test_rows_of_a_batch_answer_as_they_do_alone(name: str) -> None:
    if not zoo.is_architecture(name):
        pytest.skip("not in this mlx-lm")
    trial = Trial(zoo.model(name))
    trial.batched()
    assert rows()[name][2] == trial.way_of_batching


def test_the_trial_fails_on_rows_that_are_batched_wrongly(monkeypatch) -> None:
    """Some of its layers take their positions from the length of the keys, which is that of the longest row."""
    monkeypatch.setattr("onefold.cache.model.survey._takes_rows", lambda *_: True)
    with pytest.raises(Failed, match=DIFFERS):
        Trial(zoo.model("afm7")).batched()


def test_positions_that_change_the_base_of_a_rope_are_not_batched(monkeypatch) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    monkeypatch.setitem(zoo.OWN, "internlm3", {"rope_scaling": scaling, "max_position_embeddings": 16})
    trial = Trial(zoo.model("internlm3"))
    trial.batched()
    assert trial.way_of_batching == "singly"


@pytest.mark.parametrize("family", DISTURBED)
def test_the_trial_fails_on_a_cache_that_is_wrong_in_one_layer(family: str) -> None:
    trial = Trial(tiny(family))
    trial.continued()
    for leaf in range(len(trial.anatomy.leaves)):
        with pytest.raises(Failed, match=DIFFERS):
            trial.continued(tamper=(leaf, 8))


def test_the_trial_fails_if_it_would_not_notice(monkeypatch) -> None:
    monkeypatch.setattr(Trial, "disturb", lambda *_: None)
    with pytest.raises(Failed, match="said 'nothing'"):
        Trial(tiny("llama")).notices()


@pytest.mark.parametrize(("family", "kind"), [("mamba2", RecurrentLayer), ("llama_sliding", RotatingLayer)])
def test_recomputing_in_silence_is_not_reuse(monkeypatch, family: str, kind: type) -> None:
    """A layer that refuses its snapshots costs no answer, only the reuse: the trial must see that."""
    monkeypatch.setattr(kind, "restore", lambda *_: False)
    with pytest.raises(Failed, match="tokens were reused and not"):
        Trial(tiny(family)).continued()


def test_bytes_that_nobody_counts_are_noticed(monkeypatch) -> None:
    kept, lease = [], onefold.PrefixCache.lease

    def hoarding(*args, **options):
        kept.append(mx.ones((4096,)))
        mx.eval(kept)
        return lease(*args, **options)

    monkeypatch.setattr(onefold.PrefixCache, "lease", hoarding)
    with pytest.raises(Failed, match="the ledger says"):
        Trial(tiny("llama")).cold()


@pytest.mark.parametrize("name", ["kimi_k3", "llama", "plamo3"])
def test_a_model_that_was_used_is_the_same_model(name: str) -> None:
    """Two of these keep something for themselves that they make at their first forward."""
    model = zoo.model(name)
    fresh = model_digest(model)
    with onefold.PrefixCache(model, "64MB") as held, held.lease(list(range(1, 20))) as lease:
        mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))
        assert model_digest(model) == fresh
    assert model_digest(model) == fresh
