"""The shape of the package, read off its sources: what imports what, and who may make what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "onefold"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in FILES}

LAYERS = ("cli", "server", "engine", "cache")
"""From the outside in: each imports only what comes after it."""

NO_MLX = (
    "cache/tree.py",
    "cache/ledger.py",
    "cache/entries.py",
    "cache/eviction.py",
    "cache/backlog.py",
    "cache/gate.py",
    "cache/ondisk.py",
    "cache/pace.py",
    "cache/ranking.py",
    "cache/worker.py",
    "cache/tiers/census.py",
    "cache/tiers/directory.py",
    "cache/tiers/folder.py",
    "cache/tiers/heads.py",
    "cache/tiers/layout.py",
    "cache/tiers/order.py",
    "cache/tiers/pruning.py",
    "cache/tiers/record.py",
    "cache/tiers/vault.py",
    "cache/tiers/verify.py",
    "engine/prompt.py",
    "engine/request.py",
    "engine/tokenising.py",
    "sizes.py",
    "backend.py",
    "errors.py",
)

MLX_LM = ("cache/stock.py", "engine/stock.py")
"""The seam, and the public functions that the engine uses."""

LIVE = {"SegmentedLayer", "RotatingLayer", "ChunkedLayer", "RecurrentLayer", "CompositeLayer"}
STOCK = {
    "KVCache",
    "ConcatenateKVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "ArraysCache",
    "ChunkedKVCache",
    "CacheList",
    "BatchKVCache",
    "BatchRotatingKVCache",
}


def imports(tree: ast.Module) -> set[str]:
    """Dotted names, wherever in the file they are imported: `from a.b import c` gives a.b and a.b.c."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and called(node) in ("__import__", "import_module"):
            found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return found


def called(node: ast.Call) -> str:
    """The last part of what is called: `a.b.c()` is c."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def calls(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in names:
            yield called(node), node.lineno


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_there_is_something_to_read() -> None:
    assert {"cache/stock.py", "cache/anatomy.py", "cache/prefix_cache.py", *NO_MLX} <= set(TREES)


@pytest.mark.parametrize("file", TREES)
def test_imports_point_one_way(file: str) -> None:
    top = file.split("/")[0]
    if top not in LAYERS:
        return
    outer = LAYERS[: LAYERS.index(top)]
    wrong = [n for n in imports(TREES[file]) for layer in outer if within(n, f"onefold.{layer}")]
    assert not wrong, f"{file} imports {wrong}"


@pytest.mark.parametrize("file", NO_MLX)
def test_what_can_be_free_of_mlx_is(file: str) -> None:
    """Also of everything of ours that imports it."""
    seen, todo = set[str](), [file]
    while todo:
        at = todo.pop()
        seen.add(at)
        found = imports(TREES[at])
        mlx = [n for n in found if within(n, "mlx") or within(n, "mlx_lm")]
        assert not mlx, f"{file} imports {mlx} through {at}"
        for name in found:
            if within(name, "onefold"):
                path = "/".join(name.split(".")[1:]) + ".py"
                todo += [path] if path in TREES and path not in seen else []


@pytest.mark.parametrize("file", [f for f in TREES if f not in MLX_LM])
def test_mlx_lm_is_imported_in_one_file_of_the_cache_and_one_of_the_engine(file: str) -> None:
    assert not [n for n in imports(TREES[file]) if within(n, "mlx_lm")]


def test_the_engine_uses_what_mlx_lm_shows_and_changes_nothing_there() -> None:
    tree = TREES["engine/stock.py"]
    assert not [n for n in imports(tree) if within(n, "mlx_lm") and "._" in n]
    touched = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assert not touched, f"line {touched[0].lineno} assigns to an attribute"


def test_stock_caches_are_made_in_the_factory_and_for_uncached_models_only() -> None:
    found = {file: list(calls(tree, {"make_prompt_cache"})) for file, tree in TREES.items()}
    found = {file: where for file, where in found.items() if where}
    assert set(found) == {"cache/stock.py", "cache/anatomy.py", "cache/prefix_cache.py"}
    assert all(len(where) == 1 for where in found.values())
    functions = [n for n in ast.walk(TREES["cache/prefix_cache.py"]) if isinstance(n, ast.FunctionDef)]
    uncached = next(f for f in functions if f.name == "_open_uncached")
    assert list(calls(uncached, {"make_prompt_cache"})) == found["cache/prefix_cache.py"]


@pytest.mark.parametrize("file", TREES)
def test_live_layers_are_made_in_one_factory(file: str) -> None:
    """`Anatomy.make`: so a bound or a format that is given once holds everywhere."""
    if file == "cache/anatomy.py" or file.startswith("cache/kinds/"):
        return
    assert not list(calls(TREES[file], LIVE))


@pytest.mark.parametrize("file", TREES)
def test_nobody_goes_around_the_factory_with_stock_caches(file: str) -> None:
    """Exceptions: a ring asked for the mask that it would make, rows that hold other layers, a server that asks for its
    own quantised cache, copies that leave the cache, and rings for a model that runs uncached under a bound."""
    allowed = {
        "cache/kinds/full.py": {"RotatingKVCache"},
        "cache/rows.py": {"CacheList"},
        "cache/stock.py": {"RotatingKVCache", "CacheList"},
        "cache/foreign.py": {"QuantizedKVCache"},
        "cache/exporting.py": STOCK - {"ConcatenateKVCache", "BatchKVCache", "BatchRotatingKVCache"},
    }
    assert {name for name, _ in calls(TREES[file], STOCK)} <= allowed.get(file, set())


@pytest.mark.parametrize("file", TREES)
def test_no_broad_except(file: str) -> None:
    for node in ast.walk(TREES[file]):
        if not isinstance(node, ast.ExceptHandler):
            continue
        where = f"{file}:{node.lineno}"
        assert node.type is not None, f"{where}: bare except"
        names = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = {"Exception", "BaseException"} & {n.id for n in names if isinstance(n, ast.Name)}
        assert not broad, f"{where}: except {broad}"


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [file for file in TREES if vague & set(Path(file).with_suffix("").parts)]
