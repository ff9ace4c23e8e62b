"""Functions that scripts import."""
