"""The shape of the package, read off its sources: what imports what, and who may make what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "onefold"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in FILES}

LAYERS = ("cli", "server", "page", "engine", "cache")
"""From the outside in: each imports only what comes after it."""

CACHE = {"": 0, "request": 1, "model": 2, "tiers": 2, "memory": 3}
"""The packages of the cache: each imports only those with a larger number, and itself. "" are the files at its top."""

WRITERS = {
    "Hold": {
        "cache/leasing.py": {"from_disk", "from_remote", "grid", "reason"},
        "cache/request/opening.py": {"cached", "matched", "node", "reason", "unreserved"},
        "cache/request/forward.py": {"chunk", "rewound", "rotated_at", "unreserved"},
        "cache/request/watcher.py": {"given_up", "running", "unscheduled"},
        "cache/request/stepping.py": {"running", "unscheduled"},
        "cache/request/usage.py": {"thread", "unscheduled"},
        "cache/request/lease.py": {"target"},
        "cache/request/closing.py": {"closed", "ended_at", "node", "taken", "uncached"},
    },
    "CacheState": {
        "cache/prefix_cache.py": {"min_checkpoint_tokens", "water"},
        "cache/parts.py": {"uncached_reason"},
        "cache/ending.py": {"closed", "closing"},
        "mlx_lm/stores.py": {"on_dropped"},
    },
}
"""Which file may assign which field of the two objects that hold the state of a request and of a cache."""

NO_MLX = (
    "cache/memory/tokens.py",
    "cache/memory/tree.py",
    "cache/memory/ledger.py",
    "mlx_lm/entries.py",
    "cache/memory/eviction.py",
    "cache/tiers/disk/backlog.py",
    "cache/memory/lock.py",
    "cache/model/metal.py",
    "cache/tiers/disk/ondisk.py",
    "cache/tiers/pace.py",
    "cache/tiers/disk/syncing.py",
    "cache/memory/ranking.py",
    "cache/memory/reasons.py",
    "cache/tiers/records/reasons.py",
    "worker.py",
    "cache/tiers/records/census.py",
    "cache/tiers/records/system.py",
    "cache/tiers/records/unflushed.py",
    "cache/tiers/records/directory.py",
    "cache/tiers/identity.py",
    "cache/tiers/records/abouts.py",
    "cache/tiers/records/backups.py",
    "cache/tiers/records/files.py",
    "cache/tiers/records/folder.py",
    "cache/tiers/records/index_files.py",
    "cache/tiers/records/listing.py",
    "cache/tiers/records/locking.py",
    "cache/tiers/records/marker.py",
    "cache/tiers/records/written.py",
    "cache/tiers/records/heads.py",
    "cache/tiers/records/layout.py",
    "cache/tiers/records/order.py",
    "cache/tiers/records/pruning.py",
    "cache/tiers/records/record.py",
    "cache/tiers/records/catalog.py",
    "cache/tiers/records/cleanup.py",
    "cache/tiers/records/entry.py",
    "cache/tiers/records/faults.py",
    "cache/tiers/records/loading.py",
    "cache/tiers/records/table.py",
    "cache/tiers/records/unread.py",
    "cache/tiers/records/uses.py",
    "cache/tiers/records/verify.py",
    "cache/tiers/remote/census.py",
    "engine/prompt.py",
    "engine/request.py",
    "engine/tokenising.py",
    "machine.py",
    "cache_folder.py",
    "options.py",
    "sizes.py",
    "backend.py",
    "errors.py",
    "faults.py",
)

MLX_LM = ("cache/model/stock.py", "engine/stock.py")
"""The seam, and the public functions that the engine uses."""

KINDS = "cache/model/kinds/"
LIVE = {
    node.name
    for file, tree in TREES.items()
    if file.startswith(KINDS)
    for node in tree.body
    if isinstance(node, ast.ClassDef) and node.name.endswith("Layer")
}
"""The classes of live layers, one or more for each kind."""
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


def drawn_tree() -> set[str]:
    """The files of the source tree in docs/architecture.md."""
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    drawn = text.partition("## The source tree\n")[2].split("```")[1]
    folders: list[str] = []
    found = set()
    for line in drawn.splitlines()[1:]:
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        del folders[len(indent) // 2 :]
        if name.endswith("/"):
            folders.append(name)
        else:
            assert len(line.split()) > 1, f"{name} has no line of its own words"
            found.add("".join([*folders, name]).removeprefix("src/onefold/"))
    return found


def test_the_source_tree_of_the_documents_is_this_one() -> None:
    there = {path.relative_to(SOURCE).as_posix() for path in FILES if path.read_text().strip()}
    assert drawn_tree() - there == set(), "named, and not there"
    assert there - drawn_tree() == set(), "there, and not named"


def test_there_is_something_to_read() -> None:
    assert {"cache/model/stock.py", "cache/model/anatomy.py", "cache/prefix_cache.py", *NO_MLX} <= set(TREES)


@pytest.mark.parametrize("file", TREES)
def test_imports_point_one_way(file: str) -> None:
    top = file.split("/")[0]
    outer = LAYERS[: LAYERS.index(top)] if top in LAYERS else ("cli",) if top == "mlx_lm" else ()
    outer += ("mlx_lm",) if top in LAYERS[1:] else ("server", "page", "engine") if top == "mlx_lm" else ()
    wrong = [n for n in imports(TREES[file]) for layer in outer if within(n, f"onefold.{layer}")]
    assert not wrong, f"{file} imports {wrong}"


APIS = sorted({f.split("/")[1] for f in TREES if re.fullmatch(r"server/\w+/api\.py", f)})


def test_every_api_of_the_server_is_in_the_registry() -> None:
    folders = {f.split("/")[1] for f in TREES if f.startswith("server/") and f.count("/") == 2}
    assert folders == set(APIS) and {"openai", "anthropic", "responses"} <= folders
    assert {f"onefold.server.{api}.api" for api in APIS} <= imports(TREES["server/registry.py"])


@pytest.mark.parametrize("file", [f for f in TREES if re.fullmatch(r"server/\w+\.py", f)])
def test_only_the_registry_knows_which_apis_there_are(file: str) -> None:
    known = [n for n in imports(TREES[file]) for api in APIS if within(n, f"onefold.server.{api}")]
    assert not known or file == "server/registry.py", f"{file} imports {known}"


def own_files(file: str) -> set[str]:
    """The files of the package that a file imports, for types alone or not. A name that is no file of a folder is in
    its `__init__.py`."""
    found = set[str]()
    for name in imports(TREES[file]):
        path = "/".join(name.split(".")[1:])
        folder = path.rpartition("/")[0]
        if within(name, "onefold") and name != "onefold.__version__":
            home = f"{folder}/__init__.py" if folder else "__init__.py"
            inside = f"{path}.py" in TREES or any(f.startswith(f"{path}/") for f in TREES)
            found.add(f"{path}.py" if inside else home)
    return found & set(TREES) - {file}


@pytest.mark.parametrize("file", [f for f in TREES if f != "__init__.py"])
def test_modules_are_imported_by_name(file: str) -> None:
    """What `import_module` is given is written out, so that the other tests see it."""
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Call) and called(node) in ("__import__", "import_module"):
            plain = [a for a in node.args if isinstance(a, ast.Constant)]
            assert len(plain) == len(node.args) and not node.keywords, f"{file}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            assert all(a.name != "import_module" or a.asname is None for a in node.names), f"{file}:{node.lineno}"


@pytest.mark.parametrize("file", [f for f in TREES if f.startswith("cache/")])
def test_packages_of_the_cache_import_downwards(file: str) -> None:
    def package(path: str) -> str:
        parts = path.split("/")
        return parts[1] if len(parts) > 2 else ""

    own = package(file)
    for other in own_files(file):
        if other.startswith("cache/") and package(other) != own:
            assert CACHE[package(other)] > CACHE[own], f"{file} imports {other}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    done = set[str]()

    def visit(file: str, path: list[str]) -> None:
        assert file not in path, " -> ".join([*path[path.index(file) :], file])
        if file not in done:
            for other in own_files(file):
                visit(other, [*path, file])
            done.add(file)

    for file in TREES:
        visit(file, [])


def names_of(tree: ast.AST) -> set[str]:
    """All names that a file defines or assigns, as names or as attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # __slots__
    return found


@pytest.mark.parametrize("file", [f for f in TREES if f not in MLX_LM])
def test_no_file_reads_the_private_parts_of_another(file: str) -> None:
    known = names_of(TREES[file]) | {"_replace", "_asdict", "_fields", "_make"}
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            assert own or node.attr in known, f"{file}:{node.lineno} reads {node.attr}"
        if isinstance(node, ast.ImportFrom) and within(node.module or "", "onefold"):
            private = [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
            assert not private, f"{file}:{node.lineno} imports {private}"
        if isinstance(node, ast.Call) and called(node) in ("getattr", "setattr") and len(node.args) > 1:
            name = node.args[1]
            plain = isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.startswith("_")
            own = isinstance(node.args[0], ast.Name) and node.args[0].id in ("self", "cls")
            assert own or not plain or name.value.startswith("__"), f"{file}:{node.lineno} reads {ast.unparse(name)}"


def assigned(tree: ast.AST, of: str) -> set[str]:
    """The attributes that are assigned on something that is called `of`, or is an attribute of that name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            base = node.value
            name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            found |= {node.attr} if name.strip("_") == of else set()
        elif isinstance(node, ast.Call) and called(node) == "setattr" and isinstance(node.args[1], ast.Constant):
            found.add(str(node.args[1].value))
    return found


@pytest.mark.parametrize(
    ("kind", "home", "called"),
    [("Hold", "cache/request/hold.py", "hold"), ("CacheState", "cache/memory/state.py", "state")],
)
def test_shared_state_is_written_where_it_may_be(kind: str, home: str, called: str) -> None:
    fields = assigned(TREES[home], "self")
    assert len(fields) > 10
    found = {file: assigned(tree, called) & fields for file, tree in TREES.items() if file != home}
    assert {file: names for file, names in found.items() if names} == WRITERS[kind]


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
    assert set(found) == {"cache/model/stock.py", "cache/model/survey.py", "cache/leasing.py"}
    assert all(len(where) == 1 for where in found.values())
    functions = [n for n in ast.walk(TREES["cache/leasing.py"]) if isinstance(n, ast.FunctionDef)]
    uncached = next(f for f in functions if f.name == "_open_uncached")
    assert list(calls(uncached, {"make_prompt_cache"})) == found["cache/leasing.py"]


@pytest.mark.parametrize("file", TREES)
def test_live_layers_are_made_in_one_factory(file: str) -> None:
    """`Anatomy.make`, by way of the kinds: so a bound or a format that is given once holds everywhere."""
    if file == "cache/model/anatomy.py" or file.startswith(KINDS):
        return
    assert not list(calls(TREES[file], LIVE))


@pytest.mark.parametrize("file", TREES)
def test_nobody_goes_around_the_factory_with_stock_caches(file: str) -> None:
    """Exceptions: a ring asked for the mask that it would make, rows that hold other layers, a server that asks for its
    own quantised cache, copies that leave the cache, and rings for a model that runs uncached under a bound."""
    allowed = {
        "cache/model/kinds/full.py": {"RotatingKVCache"},
        "cache/model/kinds/registry.py": {"CacheList"},
        "cache/request/adopting.py": {"QuantizedKVCache"},
        "cache/model/exporting.py": STOCK - {"ConcatenateKVCache", "BatchKVCache", "BatchRotatingKVCache"},
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


def programs() -> list[Path]:
    """Returns the files of benchmarks and examples that are run as programs and use MLX themselves."""
    found = [*SOURCE.parents[1].glob("benchmarks/*.py"), *SOURCE.parents[1].glob("examples/*.py")]
    return [path for path in found if re.search(r"^(import|from) mlx", path.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("path", [p for p in programs() if "__main__" in p.read_text()], ids=lambda p: p.name)
def test_programs_import_onefold_before_mlx(path: Path) -> None:
    first = re.search(r"^(?:import|from) (mlx|onefold)", path.read_text(), re.MULTILINE)
    assert first and first[1] == "onefold", "a BLAS is preloaded before MLX, or not at all"


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [file for file in TREES if vague & set(Path(file).with_suffix("").parts)]


@pytest.mark.parametrize("file", [f for f in TREES if not f.startswith(KINDS)])
def test_kinds_are_asked_and_not_compared(file: str) -> None:
    """What depends on a layer's kind is a method or a capability of the kind: a new one is a file and a line."""
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = [x for x in sides if isinstance(x, ast.Attribute) and x.attr == "kind"]
            asked = [x for x in asked if not isinstance(x.value, ast.Attribute) or x.value.attr != "dtype"]
            literal = [x for x in sides if isinstance(x, (ast.Constant, ast.Tuple, ast.Set, ast.List))]
            assert not (asked and literal), f"{file}:{node.lineno} compares a kind"


MOST_LINES, MOST_METHODS, MOST_FUNCTION_LINES, MOST_PARAMETERS = 450, 25, 60, 10
BENCHMARKS = sorted((SOURCE.parents[1] / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", [*FILES, *BENCHMARKS], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_outgrows_its_job(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES, f"{path.name} has {text.count(chr(10))} lines"
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = [n.name for n in node.body if isinstance(n, functions)]
            assert len(methods) <= MOST_METHODS, f"{node.name} has {len(methods)} methods"
        elif isinstance(node, functions):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MOST_FUNCTION_LINES, f"{node.name} has {lines} lines"
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            parameters = [a for a in given if a.arg not in ("self", "cls")]
            assert len(parameters) <= MOST_PARAMETERS, f"{node.name} has {len(parameters)} parameters"


WAITS = {"cache/memory/device.py": 1, "cache/prefix_cache.py": 1, "engine/engine.py": 1}
"""Calls of `mx.eval` that need not count a failure: in the function that does, and of weights."""
EVALUATING = [f for f in TREES if f.split("/")[0] in ("cache", "engine", "mlx_lm", "generation.py")]


@pytest.mark.parametrize("file", EVALUATING)
def test_failures_of_the_device_are_counted_where_arrays_are_evaluated(file: str) -> None:
    """`device.evaluate` does that. A plain call of `mx.eval` would raise the failure once, and leave it uncounted."""
    found = [
        node.lineno
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "mx.eval"
    ]
    assert len(found) <= WAITS.get(file, 0), f"mx.eval in {file}, lines {found}"
