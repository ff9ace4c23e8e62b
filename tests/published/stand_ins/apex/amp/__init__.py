"""The scripts import it, and use it with 16-bit parameters only."""
_amp_state = None
