"""torch.sagemaker.transform: prepares a model for the degrees of the job."""
from __future__ import annotations

from torch.sagemaker import _context, _tensor
from torch.sagemaker.state_handler import state
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError


def transform(model, device=None, dtype=None, config=None, load_state_dict_from_rank0=False, cp_comm_type="p2p"):
    """Divides a model of transformers among the tensor-parallel ranks, and its sequences among the context-parallel ranks, in place.
    Returns the model, to be wrapped in FSDP. All ranks call it.

    device, dtype: moves the model, unless it is on the device meta. config: must be None, because mixtures of experts are not
    served. load_state_dict_from_rank0: the first tensor-parallel group gets the values of rank 0; pass sync_module_states=True to
    FSDP, so that all ranks get them. cp_comm_type: how keys and values travel between context-parallel ranks: "p2p", in a ring, or
    "all_gather", at once."""
    state.require()
    if config is not None:
        raise SMPUnsupportedError("tsm.transform: config is for mixtures of experts, which are not served: leave it out")
    if cp_comm_type not in ("p2p", "all_gather"):
        raise SMPConfigError(f"tsm.transform: cp_comm_type must be p2p or all_gather, not {cp_comm_type!r}")
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if load_state_dict_from_rank0 and state.rank == 0 and is_meta:
        raise SMPConfigError("tsm.transform: load_state_dict_from_rank0 needs the model's values on rank 0, and there they are on the "
                             "device meta")
    if not is_meta and (device is not None or dtype is not None):
        model = model.to(device=device, dtype=dtype)
    if state.tensor_parallel_degree > 1:
        _divide(model, state.tp_process_group, is_meta, load_state_dict_from_rank0)
    if state.context_parallel_degree > 1:
        _context.parallelize(model, state.cp_process_group, cp_comm_type)
    _register_layers(model)
    return model


def _divide(model, group, is_meta, is_from_rank0):
    """Divides a model among a tensor-parallel group. All ranks get the first rank's values, if it has any."""
    if not is_from_rank0:
        _tensor.check_values(is_meta, group)
    if state.rank < state.tensor_parallel_degree if is_from_rank0 else not is_meta:
        _tensor.send_values(model, group)
    _tensor.parallelize(model, group)


def _register_layers(model):
    """Makes the layers of a model instances of TransformerLayer, by which scripts wrap and checkpoint them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for kind in {type(module) for module in model.modules() if type(module).__name__ in names}:
        TransformerLayer.register(kind)
