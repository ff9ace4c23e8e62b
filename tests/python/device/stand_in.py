"""The device "standin" of torch, over the stand-in driver of tests/mock/cuda: compiled at the first use and kept, as the back-end
is.

start() makes it known to torch in this process, with what FSDP2 and torch's own device modules have. The driver has threads, so
the process must not fork afterwards. MOCK_CUDA in the environment sets the driver's modes (mock_cuda.h)."""
import contextlib
import hashlib
import importlib.util
import os
import pathlib
import sys
import types

import torch

NAME = "standin"
SOURCE = pathlib.Path(__file__).with_name("stand_in.cpp")
TOP = SOURCE.parents[3]
DRIVER = os.environ.get("SHOAL_MOCK_CUDA") or str(TOP / "build/tests/unit/libcuda.so.1")
HEADERS = (TOP / "tests/mock/cuda", TOP / "src")
USED = (SOURCE, HEADERS[0] / "mock_client.h", HEADERS[0] / "mock_cuda.h", HEADERS[1] / "device/cuda/cuda_abi.h")

driver = None  # the module in C++, once started


def compiled():
    """The path of the module, which is compiled where that has not been done."""
    from shoal.torch import _compile
    digest = hashlib.sha256(torch.__version__.encode() + b"".join(path.read_bytes() for path in USED)).hexdigest()[:16]
    folder = _compile.cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"stand_in-{torch.__version__}-{digest}.so"
    if not path.exists():
        _compile._compile_once(command(_compile), path)
    return path


def command(_compile):
    name = "-DTORCH_EXTENSION_NAME="
    own = {str(_compile.MAIN): str(SOURCE), name + _compile.MODULE: name + "stand_in", "-O2": "-O0"}
    return [own.get(part, part) for part in _compile._command()] + [f"-I{folder}" for folder in HEADERS]


def start():
    global driver
    if driver:
        return
    torch.utils.rename_privateuse1_backend(NAME)  # before shoal.torch is imported, which asks for that name
    spec = importlib.util.spec_from_file_location("stand_in", compiled())
    driver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    driver.open(DRIVER)
    torch._register_device_module(NAME, sys.modules[__name__].module())


def device(index=0):
    return torch.device(NAME, index)


def module():
    """What torch.cuda is to CUDA, as far as something asks for it."""
    made = types.ModuleType(f"torch.{NAME}")
    made.Stream = lambda device=None, priority=0: torch.Stream(_device(device), priority=priority)
    made.Event = lambda **_: torch.Event(NAME)
    made.stream, made.current_stream = on_stream, current_stream
    made.current_device, made.set_device = torch.accelerator.current_device_index, torch.accelerator.set_device_index
    made.device_count, made.is_available, made.is_initialized = torch.accelerator.device_count, lambda: True, lambda: True
    made.synchronize = torch.accelerator.synchronize
    made._is_in_bad_fork, made.manual_seed_all = lambda: False, lambda seed: None
    made.get_rng_state, made.set_rng_state = lambda device=None: torch.get_rng_state(), lambda state, device=None: None
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return made


def _device(given):
    return device(torch.accelerator.current_device_index()) if given is None else torch.device(given)


def current_stream(given=None):
    return torch.accelerator.current_stream(_device(given))


@contextlib.contextmanager
def on_stream(stream):
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
