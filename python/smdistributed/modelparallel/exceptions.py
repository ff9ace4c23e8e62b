"""The exceptions that this package itself raises. Their names begin as the vendor's do, so that a log shows where they are from."""


class SMPError(RuntimeError):
    """The script cannot train as a job of smdistributed.modelparallel; the text contains the remedy."""


class SMPConfigError(SMPError, ValueError):
    """A parameter of the job is wrong, or contradicts another one."""


class SMPUnsupportedError(SMPError, NotImplementedError):
    """Something that the vendor's library has and this package does not."""
