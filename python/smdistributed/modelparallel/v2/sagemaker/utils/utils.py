"""Small functions that scripts import."""
import contextlib
import time

from torch.sagemaker.logger import get_logger


@contextlib.contextmanager
def timeit(condition, message="", rank=0):
    """Logs how long the block took, on rank 0 and if the condition is true."""
    began = time.perf_counter()
    yield
    if condition and rank == 0:
        get_logger().info("%s: %.3f s", message, time.perf_counter() - began)
