"""In place of botocore."""
from . import exceptions  # noqa: F401
