"""What this package raises itself. SageMaker's training toolkit looks for the names of these classes in what a failed script wrote:
the name that it finds stands first in the job's failure reason, where it says ExecuteUserScriptError otherwise."""


class SMDDPError(RuntimeError):
    """The script cannot train as a job of smdistributed.dataparallel; the text says what to do."""
