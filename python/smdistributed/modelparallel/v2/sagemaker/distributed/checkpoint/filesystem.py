"""Files of checkpoints: torch's own format, which torch.distributed.checkpoint reads and writes as well."""
import contextlib
import os

from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

from smdistributed.modelparallel.exceptions import SMPError, SMPUnsupportedError


@contextlib.contextmanager
def failures_named(what):
    """Raises an SMPError with the first failed rank and its error, in place of torch's CheckpointException, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        first = error.failures[rank][0]
        raise SMPError(f"torch.sagemaker.distributed.checkpoint: {what} failed on rank {rank} of the group: {type(first).__name__}: "
                       f"{first}") from error


def local_path(checkpoint_id):
    """Returns the path of a checkpoint. Raises an error for one in S3."""
    path = os.fspath(checkpoint_id)
    if path.startswith("s3:"):
        raise SMPUnsupportedError(f"torch.sagemaker.distributed.checkpoint: {path}: files in S3 are not served: write to a folder, which "
                                  "shoal.job can copy to S3 (checkpoint_s3_uri)")
    return path


class DistributedFileSystemReader(FileSystemReader):
    def __init__(self, path, *args, **kwargs):
        super().__init__(local_path(path), *args, **kwargs)


class DistributedFileSystemWriter(FileSystemWriter):
    def __init__(self, path, *args, **kwargs):
        super().__init__(local_path(path), *args, **kwargs)
