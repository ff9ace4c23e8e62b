"""Exceptions under Horovod's names."""


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks called different things, or a rank is gone."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed."""
