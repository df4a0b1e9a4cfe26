"""The benchmark of formats: its measures run whole, and its attention is MLX's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import tiny

import onefold

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


class Words:
    def encode(self, text: str) -> list[int]:
        return [len(word) * 7 % 90 for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_every_measure_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import kv_quality

    monkeypatch.setattr(onefold, "load", lambda name: (tiny("llama_q"), Words()), raising=False)
    text = tmp_path / "text"
    text.write_text("one three five seven nineteen " * 500)
    small = ["--windows", "2", "--tokens", "64", "--prompts", "2", "--facts", "1", "--text", str(text)]
    kv_quality.main(["--formats", "8", "affine4", *small])
    rows = {row[0]: row for row in map(cells, capsys.readouterr().out.splitlines()) if row}
    assert rows["16"][2:5] == ["+0.00%", "0.00000", "100.0%"] and rows["16"][6] == "0.0000"
    assert 0 < float(rows["8"][3]) < float(rows["affine4"][3]) and float(rows["8"][6]) < float(rows["affine4"][6])
    assert all(0 <= float(rows[name][4].rstrip("%")) <= 100 and rows[name][5].endswith("of 1") for name in ("8", "16"))


@pytest.mark.parametrize("heads, queries, keys", [(4, 7, 7), (4, 7, 40), (2, 300, 1300)])
def test_attention_with_a_softmax_of_numpy_is_mlx_s(heads: int, queries: int, keys: int) -> None:
    import cpu_attention

    shapes: Any = ((1, heads, queries, 32), (1, 2, keys, 32), (1, 2, keys, 16))
    q, k, v = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.7, mask="causal")
    with cpu_attention.numpy_softmax():
        assert mx.fast.scaled_dot_product_attention is cpu_attention.attend
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.7, mask="causal")
    assert mx.abs(found - expected).max().item() < 1e-5
    assert mx.fast.scaled_dot_product_attention is not cpu_attention.attend
