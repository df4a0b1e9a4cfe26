"""Keep MLX's CUDA backend running through thousands of shapes.

MLX keeps plans of attention calls and of graphs in caches of a few hundred, counts the misses, and beyond twice the
capacity raises "Cache thrashing is happening" for every new shape until the process ends. A server meets that many
prompt lengths in an hour. A miss costs some milliseconds; an exception costs the server. So the check is switched off
and the caches are made larger, unless the environment says otherwise.
"""

from __future__ import annotations

import os

_SETTINGS = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
}


def allow_many_shapes() -> None:
    """Set MLX's environment variables where they are not set. MLX reads them when its caches are first used, so this
    must be called before the first computation on a GPU. Without CUDA they mean nothing."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
