"""`import smdistributed.modelparallel.torch as smp`: version 1 of SageMaker's model-parallel library over Shoal's pipelines. The
package's README describes what each name does here."""
from smdistributed.modelparallel import __version__  # noqa: F401
from smdistributed.modelparallel.torch import amp, model, nn, optimizer, optimizers  # noqa: F401
from smdistributed.modelparallel.torch._activation import checkpoint, checkpoint_sequential, set_activation_checkpointing  # noqa: F401
from smdistributed.modelparallel.torch._checkpoints import load, resume_from_checkpoint, save, save_checkpoint  # noqa: F401
from smdistributed.modelparallel.torch._creation import delay_param_initialization, model_creation  # noqa: F401
from smdistributed.modelparallel.torch._messages import CommGroup, RankType, allgather, barrier, broadcast, recv_from, send  # noqa: F401
from smdistributed.modelparallel.torch._partition import partition, set_partition  # noqa: F401
from smdistributed.modelparallel.torch._state import (dp_rank, dp_size, get_dp_group, get_dp_process_group, get_mp_group,  # noqa: F401
                                                      get_mp_process_group, get_pp_group, get_pp_process_group, get_rdp_group,
                                                      get_rdp_process_group, get_tp_group, get_tp_process_group,
                                                      get_world_process_group, init, is_initialized, is_tracing, local_rank, local_size,
                                                      mp_rank, mp_size, pp_rank, pp_size, rank, rdp_rank, rdp_size, size, state,
                                                      tp_rank, tp_size)
from smdistributed.modelparallel.torch._step import StepOutput, step  # noqa: F401
from smdistributed.modelparallel.torch._tensor import (set_tensor_parallelism, tensor_parallelism, tp_register,  # noqa: F401
                                                       tp_register_with_module)
from smdistributed.modelparallel.torch.model import DistributedModel  # noqa: F401
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer  # noqa: F401

WORLD, MP_GROUP, DP_GROUP, PP_GROUP, TP_GROUP, RDP_GROUP = CommGroup
WORLD_RANK, MP_RANK, DP_RANK, PP_RANK, TP_RANK, RDP_RANK = RankType


def dp_barrier():
    barrier(DP_GROUP)


def mp_barrier():
    barrier(MP_GROUP)


def pp_barrier():
    barrier(PP_GROUP)


def tp_barrier():
    barrier(TP_GROUP)


def rdp_barrier():
    barrier(RDP_GROUP)
