"""The name under which scripts import the state."""
from smdistributed.modelparallel.torch._state import state  # noqa: F401
