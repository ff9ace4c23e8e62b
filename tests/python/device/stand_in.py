"""The device "standin" of torch, over the stand-in driver of tests/mock/cuda. It is compiled at first use and cached, like
the back-end.

start() registers it with torch in this process, with everything that FSDP2 and torch's own device modules use. The driver
has threads, so the process must not fork afterwards. MOCK_CUDA in the environment sets the driver's modes (mock_cuda.h).
STAND_IN_NAME=cuda names the device "cuda", in a torch built for CPUs. Tests then use the names of a program for GPUs, and
as much of torch's code for CUDA as such a torch has."""
import contextlib
import hashlib
import importlib.util
import os
import pathlib
import sys
import types

import torch

NAME = os.environ.get("STAND_IN_NAME", "standin")
SOURCE = pathlib.Path(__file__).with_name("stand_in.cpp")
TOP = SOURCE.parents[3]
DRIVER = os.environ.get("SHOAL_MOCK_CUDA") or str(TOP / "build/tests/unit/libcuda.so.1")
HEADERS = (TOP / "tests/mock/cuda", TOP / "src")
USED = (SOURCE, HEADERS[0] / "mock_client.h", HEADERS[0] / "mock_cuda.h", HEADERS[1] / "device/cuda/cuda_abi.h")

driver = None  # the module in C++, once started


def compiled():
    """Returns the path of the module. Compiles it if necessary."""
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
    if NAME != "cuda":
        torch.utils.rename_privateuse1_backend(NAME)  # before shoal.torch is imported, which uses that name
    spec = importlib.util.spec_from_file_location("stand_in", compiled())
    driver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    driver.open(DRIVER)
    publish(sys.modules[__name__].module())


def publish(names):
    """Registers the device's functions. In a torch built for CPUs torch.cuda exists, but its functions do not work, so they
    are replaced."""
    if NAME != "cuda":
        torch._register_device_module(NAME, names)
        return
    torch.cuda._lazy_init = lambda: None
    for name, value in vars(names).items():
        if not name.startswith("__"):
            setattr(torch.cuda, name, value)


def api():
    """Returns torch.cuda, or the module that replaces it."""
    return getattr(torch, NAME)


def device(index=0):
    return torch.device(NAME, index)


def module():
    """Returns a module with the part of torch.cuda's interface that is used."""
    made = types.ModuleType(f"torch.{NAME}")
    made.Stream = lambda device=None, priority=0: torch.Stream(_device(device), priority=priority)
    made.Event = lambda **_: torch.Event(NAME)
    made.stream, made.current_stream, made.device = on_stream, current_stream, on_device
    made.current_device, made.set_device = driver.current_device, lambda given: driver.set_device(_device(given).index)
    made.device_count, made.is_available, made.is_initialized = driver.device_count, lambda: True, lambda: True
    made.synchronize = lambda given=None: driver.synchronize(_device(given).index)
    made.get_device_capability = lambda device=None: (9, 0)
    made._is_in_bad_fork, made.manual_seed_all = lambda: False, lambda seed: None
    made.get_rng_state, made.set_rng_state = lambda device=None: torch.get_rng_state(), lambda state, device=None: None
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return made


def _device(given):
    return device(driver.current_device()) if given is None else device(given) if isinstance(given, int) else torch.device(given)


def current_stream(given=None):
    where = _device(given)
    return driver.current_stream(driver.current_device() if where.index is None else where.index)


@contextlib.contextmanager
def on_device(given):
    before = driver.current_device()
    driver.set_device(_device(given).index or 0)
    try:
        yield
    finally:
        driver.set_device(before)


@contextlib.contextmanager
def on_stream(stream):
    before = current_stream(stream.device)
    driver.set_stream(stream)
    try:
        yield
    finally:
        driver.set_stream(before)
