"""The formats of stored KV. To add one, add a file in this folder and a line in `FORMATS`: see docs/extending.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec
from onefold.cache.model.formats.affine import Affine
from onefold.cache.model.formats.codec import Codec, StockForm
from onefold.cache.model.formats.names import name_of
from onefold.cache.model.formats.plain import PlainCodec
from onefold.cache.model.formats.rotation import is_turnable
from onefold.cache.model.formats.sides import Sides, scale_type
from onefold.cache.model.formats.turned import turned_sides
from onefold.cache.model.kernels.coded_rows import DIMS, Coding
from onefold.cache.model.kernels.decode import Format
from onefold.errors import ConfigError


class Made(NamedTuple):
    """A format of `FORMATS`."""

    about: str
    tag: str | int
    """Its name in a namespace. What was stored under another is not read."""
    takes: Callable[[ArraySpec, ArraySpec], bool]
    """Whether it can store such keys and values."""
    codec: Callable[[ArraySpec, ArraySpec], Codec]


def _affine(bits: int) -> Callable[[ArraySpec, ArraySpec], Codec]:
    def make(k: ArraySpec, v: ArraySpec) -> Codec:
        return affine_codec(k, v, bits, 64 if k.dim % 64 == v.dim % 64 == 0 else 32)

    return make


def affine_codec(k: ArraySpec, v: ArraySpec, bits: int, group: int, *, native: bool = False) -> Codec:
    """Returns the codec of affine groups. `native` are those of a model that quantises its KV itself."""
    key, value = (Affine(a.dim, bits, group, a.dtype if native else scale_type(a.dtype)) for a in (k, v))
    form = Format("affine", 6, bits, group) if bits in (4, 8) and k.dtype.size == 2 else None
    return Sides(key, value, k.dtype, form, StockForm(bits, group))


def _in_groups(k: ArraySpec, v: ArraySpec) -> bool:
    return k.dim % 32 == 0 and v.dim % 32 == 0


def _rotatable(k: ArraySpec, v: ArraySpec) -> bool:
    return _in_groups(k, v) and is_turnable(k.dim) and is_turnable(v.dim) and k.heads == v.heads


def _turned(name: str, key_bits: int, value_bits: int) -> Callable[[ArraySpec, ArraySpec], Codec]:
    def make(k: ArraySpec, v: ArraySpec) -> Codec:
        how = Coding(name, k.dim, v.dim, key_bits, value_bits, k.dtype)
        return turned_sides(how, turns=k.dim in DIMS and v.dim in DIMS)

    return make


def _plain(k: ArraySpec, v: ArraySpec) -> Codec:
    return PlainCodec()


FORMATS: dict[str, Made] = {
    "16": Made("as the model makes it", 16, lambda k, v: True, _plain),
    "8": Made("8 bits, rotated", "r8r8", _rotatable, _turned("rotated", 8, 8)),
    "k8v4": Made("keys 8 bits, values 4 bits, rotated", "r8g4", _rotatable, _turned("rotated", 8, 4)),
    "4": Made("keys 5 bits, values 4 bits, rotated", "r5r4", _rotatable, _turned("rotated", 5, 4)),
    "affine8": Made("8 bits, affine; mlx-lm's own", 8, _in_groups, _affine(8)),
    "affine4": Made("4 bits, affine; mlx-lm's own", 4, _in_groups, _affine(4)),
    "turbo4": Made("TurboQuant, 4 bits", "turbo4", _rotatable, _turned("turbo", 4, 4)),
    "turbo3": Made("TurboQuant, 3 bits", "turbo3", _rotatable, _turned("turbo", 3, 3)),
}  # fmt: skip


@dataclass(frozen=True)
class KvFormat:
    """How a cache stores KV."""

    name: str = "16"
    edges: int = 0
    """So many of the first and of the last layers stay as the model makes them."""

    @classmethod
    def parse(cls, kv: str | int) -> KvFormat:
        """Returns the format of a name, such as "4", or "4+2" where the first two and the last two layers stay as the
        model makes them. Raises ConfigError for a format that there is not."""
        name, plus, edges = str(kv).strip().partition("+")
        if name not in FORMATS:
            raise ConfigError(
                f"kv must be one of {', '.join(FORMATS)}, or with the first and last layers as the model makes them, "
                f"such as 4+2; got {kv!r}"
            )
        if plus and name == "16":
            raise ConfigError(f"kv={kv!r}: with 16, all layers are as the model makes them; leave {plus}{edges} out")
        if plus and not (edges.isdecimal() and len(edges) <= 9 and 0 < int(edges) < 1000):
            raise ConfigError(
                f"kv={kv!r}: after the + comes how many of the first and of the last layers stay as the model makes "
                f"them, at least 1, as in {name}+2"
            )
        return cls(name, int(edges or 0))

    def __str__(self) -> str:
        return f"{self.name}+{self.edges}" if self.edges else self.name

    def stored(self, made: mx.Dtype | None, share: float) -> str:
        """Returns what it stores of keys and values of this type, in words. `share`: of their bytes."""
        about, bits = FORMATS[self.name].about, f"{8 * made.size} bits" if made is not None else ""
        if self.plain:
            return f"{bits}, {about}" if bits else about
        edges = f", and the first and last {self.edges} layers as the model makes them" if self.edges else ""
        return f"{about}{edges}: {share:.2f} of the model's own {bits}"

    @property
    def plain(self) -> bool:
        return self.name == "16"

    def tag(self, made: mx.Dtype | None) -> str | int:
        """Returns its name in a namespace, for keys and values of this type. Earlier versions stored the scales of 32
        bit models in 32 bits, under the same number."""
        tag = FORMATS[self.name].tag
        if isinstance(tag, int) and tag < 16 and made is not None and made == mx.float32:
            tag = f"{tag}s"
        return f"{tag}+{self.edges}" if self.edges else tag

    def takes(self, k: ArraySpec, v: ArraySpec) -> bool:
        """Whether it can store such keys and values."""
        return FORMATS[self.name].takes(k, v)

    def codec(self, k: ArraySpec, v: ArraySpec) -> Codec:
        return FORMATS[self.name].codec(k, v)


def kv_of(made: mx.Dtype | None, tag: object) -> str:
    """Returns the name of the format that has this tag for keys and values of this type; empty if none has it."""
    name = name_of(tag)
    try:
        return name if KvFormat.parse(name).tag(made) == tag else ""
    except ConfigError:
        return ""
