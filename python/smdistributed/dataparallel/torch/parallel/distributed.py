"""DistributedDataParallel with the arguments of versions before SMDDP 1.4."""
import shoal.torch

import smdistributed.dataparallel.torch.distributed  # noqa: F401 warns that this is deprecated

BUCKET_CAP_MB = 25


class DistributedDataParallel(shoal.torch.DistributedDataParallel):
    """Shoal's subclass of PyTorch's class, with the order of arguments of that time; pass further ones by name. Also broadcasts
    buffers."""

    def __init__(self, module, device_ids=None, output_device=None, broadcast_buffers=True, process_group=None,
                 bucket_cap_mb=None, **more):
        super().__init__(module, device_ids=device_ids, output_device=output_device, broadcast_buffers=broadcast_buffers,
                         process_group=process_group, bucket_cap_mb=bucket_cap_mb or BUCKET_CAP_MB, **more)
