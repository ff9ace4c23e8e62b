"""The logger of the package."""
import logging


def get_logger():
    return logging.getLogger("torch.sagemaker")
