"""The names of SageMaker's model-parallel library, over Shoal. PyTorch scripts import `smdistributed.modelparallel.torch` for version 1
and `torch.sagemaker` for version 2."""
import os

__version__ = "1.15.0"  # the vendor's, whose interface is served: programs choose their calls by it


def extend_torch():
    """Lets `import torch.sagemaker` find version 2, which is the only content of the folder v2. PyTorch calls this at the end of its own
    import, because the package's entry point in the group torch.backends names it. The folder is last on PyTorch's path, so a module
    that PyTorch itself has is found first."""
    import torch

    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "v2")
    if folder not in torch.__path__:
        torch.__path__.append(folder)
