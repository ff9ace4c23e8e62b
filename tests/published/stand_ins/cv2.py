"""The scripts import it, and call it for evaluation and key points only."""
__version__ = "4.0"
