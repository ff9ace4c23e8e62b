"""In place of torchvision: images that are made, because there is nothing to download them from."""
from . import datasets, transforms  # noqa: F401
