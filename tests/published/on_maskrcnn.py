#!/usr/bin/env python3
"""on_maskrcnn.py SCRIPT WORD ...: runs the Mask R-CNN example on this machine's CPUs. Besides what on_cpu.py does, tensors are on a GPU
for the example's own code, which has no other path for batches; and its compiled operators are torch's."""
import os
import sys

os.environ["PYTORCH_JIT"] = "0"  # torch reads it when it is imported: the scripted layers are plain ones

import types  # noqa: E402

import numpy  # noqa: E402
import on_cpu  # noqa: E402
import torch  # noqa: E402
import torch.utils.collect_env  # noqa: E402


def is_on_gpu(_):
    return sys._getframe(1).f_globals.get("__name__", "").startswith("maskrcnn_benchmark")


class Stream:
    def wait_stream(self, _):
        """Nothing runs beside."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def restore():
    numpy.float = float
    torch._six.PY3 = True
    torch.nn.modules.conv._ConvTransposeMixin = type("_ConvTransposeMixin", (), {})
    torch.hub._download_url_to_file = torch.hub.download_url_to_file
    for name in ("_jit_set_profiling_executor", "_jit_set_profiling_mode"):
        setattr(torch._C, name, lambda _: None)
    torch.utils.collect_env.get_pretty_env_info = lambda: "torch " + torch.__version__
    torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream = Stream, lambda stream: stream, Stream
    import maskrcnn_C
    sys.modules["maskrcnn_benchmark._C"] = maskrcnn_C
    sys.modules["maskrcnn_benchmark.NHWC"] = types.ModuleType("maskrcnn_benchmark.NHWC")
    torch.Tensor.is_cuda = property(is_on_gpu)


if __name__ == "__main__":
    on_cpu.pretend()
    on_cpu.restore()
    on_cpu.run(sys.argv[1:], restore)
