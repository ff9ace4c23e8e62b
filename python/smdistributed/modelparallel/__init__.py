"""The names of SageMaker's model-parallel library, over Shoal. PyTorch scripts import `smdistributed.modelparallel.torch`."""
__version__ = "1.15.0"  # the vendor's, whose interface is served: programs choose their calls by it
