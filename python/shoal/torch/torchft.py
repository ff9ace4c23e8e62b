"""torchft's process group over Shoal: replicas that may come and go sum gradients like the ranks of a group.

    from shoal.torch.torchft import ProcessGroupShoal
    manager = torchft.Manager(pg=ProcessGroupShoal(timeout=timedelta(seconds=30)), ...)

Whenever the set of replicas changes, the manager calls `configure`. It aborts the old communicator, which ends its operations
on all of its ranks, and the present replicas make a new one. Tested with torchft 0.2.0."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from . import join


class ProcessGroupShoal(ProcessGroupWrapper):
    """torchft.ProcessGroupWrapper over Shoal. `timeout` applies to each collective and to making a communicator."""

    def _create_pg(self, store, rank, world_size):
        name = f"torchft.{self._quorum_id if self._quorum_id is not None else 'world'}"
        served = join(store, rank, world_size, self._timeout, name, list(self._global_ranks or []))
        if isinstance(served, dist.ProcessGroup):  # the shim in Python returns a group
            return served
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, served)
        return group

    def getBackendName(self):
        return "torchft-shoal"

    def shutdown(self):
        """Ends the group on this rank: unfinished operations fail here."""
        group, self._pg = self._pg, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()
