"""Importing this module registers the back-end "smddp" with torch.distributed. It is Shoal's back-end under the name that
scripts use.

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

It also sets the environment variables that such scripts, and the libraries above them, read.
"""
import shoal.torch

from smdistributed.dataparallel import _environment

_environment.complete()
shoal.torch.register("smddp")
_environment.announce()
