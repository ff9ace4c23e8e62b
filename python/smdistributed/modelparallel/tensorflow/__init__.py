"""`import smdistributed.modelparallel.tensorflow as smp`: SageMaker's model-parallel library for TensorFlow, over shoal.tensorflow. Each
process keeps the layers of one partition of a Keras model. The package's README describes what each name does here."""
from smdistributed.modelparallel import __version__  # noqa: F401
from smdistributed.modelparallel.tensorflow._checkpoints import CheckpointManager  # noqa: F401
from smdistributed.modelparallel.tensorflow._model import DistributedModel, partition  # noqa: F401
from smdistributed.modelparallel.tensorflow._state import (barrier, dp_rank, dp_size, init, is_initialized, local_rank,  # noqa: F401
                                                           local_size, mp_rank, mp_size, pp_rank, pp_size, rank, rdp_rank, rdp_size,
                                                           size)
from smdistributed.modelparallel.tensorflow._step import StepOutput, step  # noqa: F401
