"""Limits of MLX's Metal backend and of macOS that a forward must respect. None of them was measured on a Mac yet.

- Where attention is not fused, the scores of all heads, queries and keys are stored, in two or three arrays at a time.
- macOS ends a command that occupies the GPU for too long, and may then refuse every later command of the process.

No MLX in this file.
"""

from __future__ import annotations

VECTOR_QUERIES = 8
"""Up to so many queries MLX uses its vector kernel, which reads the keys once for each query head."""
_VECTOR_DIMS = frozenset({(64, 64), (96, 96), (128, 128), (256, 256), (192, 128)})
_FULL_DIMS = frozenset({(64, 64), (72, 72), (80, 80), (96, 96), (128, 128)})
"""Dimensions of queries and values. From `has_fused_kernel` and `ScaledDotProductAttention::use_fallback` of MLX 0.32
(mlx/backend/metal/scaled_dot_product_attention.cpp). MLX prefers the unfused path for 192, and for 256 with many
queries except on GPUs with neural accelerators, and fuses 512 only for some decode steps: these count as unfused. A
version of MLX that fuses more costs memory that is reserved and not used, and shorter chunks."""
_VECTOR_ROWS = 32
"""The most queries of all heads that share a key head, in the vector kernel."""

CHUNK_TIMES_CONTEXT = 1 << 26
"""The most queries times keys of one chunk: 512 queries at 131,072 keys. A guess that leaves the watchdog a margin."""
SHORTEST_CHUNK = 32


_TOO_LONG = ("impacting interactivity", "timeout", "timed out")
_REFUSED = "submissionsignored"


def fuses(n_queries: int, query_dim: int, value_dim: int, queries_per_key_head: int = 1) -> bool:
    """Whether attention of this shape stores no scores."""
    dims = (query_dim, value_dim)
    if n_queries > VECTOR_QUERIES:
        return dims in _FULL_DIMS
    return dims in _VECTOR_DIMS and n_queries * queries_per_key_head <= _VECTOR_ROWS


def longest_chunk(context_tokens: int) -> int:
    """Returns how many tokens of a prompt one forward may have, if it reads so many tokens of context, its own
    included: a power of two."""
    most = max(SHORTEST_CHUNK, CHUNK_TIMES_CONTEXT // max(1, context_tokens))
    return 1 << (most.bit_length() - 1)


def hint(error: BaseException) -> str:
    """Returns what a user can do about an error of Metal, as the end of a sentence; empty if nothing is known."""
    text = str(error).lower().replace(" ", "")
    if _REFUSED in text:
        return ". macOS refuses all commands of this process: start it again"
    if "commandbuffer" in text and any(sign.replace(" ", "") in text for sign in _TOO_LONG):
        return (
            ". macOS ended a command because it took too long: use a smaller --prefill-chunk, or set "
            "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1"
        )
    return ""
