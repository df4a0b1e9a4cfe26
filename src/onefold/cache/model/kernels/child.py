"""The child process of a trial: compares a kernel of the device with plain operations, and prints the result."""

from __future__ import annotations

import json
import sys

from onefold.cache.model.kernels import coding_comparison, comparison, current
from onefold.cache.model.kernels.trial import CodingTrial, ProductTrial, parsed


def main(arguments: list[str]) -> int:
    """Prints why the kernel may not serve, or an empty reason, as one line of JSON."""
    trial = parsed(json.loads(arguments[0]))
    kernel = current.device_kernel()
    if kernel is None:
        found = "this device has no kernel"
    elif isinstance(trial, ProductTrial):
        found = comparison.compare_products(trial.dtype)
    elif isinstance(trial, CodingTrial):
        found = coding_comparison.compare(trial.coding)
    else:
        found = kernel.takes(trial.shape) or comparison.compare(kernel, *trial)
    print(json.dumps({"found": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
