"""The exceptions that this package itself raises. SageMaker's training toolkit searches a failed script's output for the names
of these classes. It puts the name that it finds first in the job's failure reason, instead of ExecuteUserScriptError."""


class SMDDPError(RuntimeError):
    """The script cannot train as a job of smdistributed.dataparallel; the text contains the remedy."""
