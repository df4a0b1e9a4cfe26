"""Before any test imports MLX: on a Linux CPU, onefold gives it a faster BLAS."""

import onefold  # noqa: F401
