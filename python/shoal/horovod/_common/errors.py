"""Exceptions under Horovod's names."""


class HorovodInternalError(RuntimeError):
    """An operation failed: the ranks' calls differ, or a rank is gone."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed."""
