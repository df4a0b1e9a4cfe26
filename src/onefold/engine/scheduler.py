"""The scheduler: one turn after the other, each of them admission, disk, prefill and decode.

- `admission.py` gives memory to waiting requests, oldest first, and reads what they have on disk.
- `prefill.py` runs at most one chunk of a prompt between two decode steps; `share.py` divides the time.
- `decode.py` runs one forward for all rows.
- `recovery.py` preempts a request when memory runs out, and fails a request whose work fails.
- `jobs.py` holds the requests.

Everything here runs on one thread, which owns MLX.
"""

from __future__ import annotations

import time
from typing import Any

from onefold.cache.prefix_cache import PrefixCache
from onefold.engine.admission import Admission
from onefold.engine.decode import Decode
from onefold.engine.jobs import Jobs
from onefold.engine.limits import Limits
from onefold.engine.prefill import Prefill
from onefold.engine.recovery import Recovery
from onefold.engine.sampling import Chooser
from onefold.engine.share import Share


class Scheduler:
    def __init__(self, model: Any, cache: PrefixCache, limits: Limits) -> None:
        self.most_tokens = cache.inventory.most_tokens()
        """The longest conversation that the budget has room for."""
        self.jobs = Jobs(limits.rows)
        self._look = cache.budget.look
        self._share = Share(limits.prefill_share, limits.prefill_chunk)
        chooser = Chooser()
        self._recovery = recovery = Recovery(self.jobs, cache, self.most_tokens)
        self._admission = Admission(cache, self.jobs, recovery, limits, self.most_tokens)
        self._prefill = Prefill(model, cache, self.jobs, recovery, self._share, chooser)
        self._decode = Decode(cache, self.jobs, recovery, chooser)

    def look_at_memory(self) -> None:
        """Adapts the budget to the machine's memory, if it follows that. A failure of the device there is one of all
        running requests. Raises DeviceLost."""
        self._recovery.run([], self._look, preempt=False)

    def tick(self) -> None:
        """Runs one turn: admits requests, reads some records from disk, runs one chunk of prefill and one decode
        step. Raises DeviceLost."""
        self._recovery.look_for_failures()
        self._admission.expire()
        self._admission.admit()
        streams, begun = bool(self.jobs.decoding), time.perf_counter()
        if not streams or self._share.tolerates:
            self._admission.read_records()
        disk_seconds = time.perf_counter() - begun
        chunk_seconds = 0.0 if self._decode.delays_prompts else self._prefill.run()
        self._decode.run(after_chunk=chunk_seconds > 0)
        self._recovery.look_for_failures()
        if streams:
            prompt_seconds = disk_seconds + chunk_seconds
            self._share.prefilled(prompt_seconds)
            self._share.streamed(time.perf_counter() - begun - prompt_seconds)
        else:
            self._share.rested()
