"""Saves that run during training."""
from __future__ import annotations

from torch.sagemaker.distributed.checkpoint.filesystem import failures_named


class AsyncCallsQueue:
    """The saves that have begun and for which nobody has waited yet."""

    def __init__(self):
        self._futures, self._count = {}, 0

    def schedule(self, future):
        """Adds a save. Returns its index."""
        self._futures[self._count], self._count = future, self._count + 1
        return self._count - 1

    def maybe_finalize_async_calls(self, blocking=False, process_group=None, skip_sync=False):
        """Returns the indices of the saves that have ended, and forgets them. Raises the error of one that failed. blocking: waits for
        all. process_group, skip_sync: without effect, because a save ends on all its ranks together."""
        ended = [index for index, future in self._futures.items() if blocking or future.done()]
        for index in ended:
            with failures_named("a save"):
                self._futures.pop(index).result()
        return ended

    def get_num_unfinalized_calls(self):
        return len(self._futures)

    def close(self):
        """Waits for all saves."""
        self.maybe_finalize_async_calls(blocking=True)
