"""The scripts import it and do not use it."""
