"""Like stand_in.py, serves test_device.py, but with this machine's GPUs and a torch built for CUDA. hold() puts the current
stream to sleep."""
import torch
from tap import Skip

NAME = "cuda"
ASLEEP_CYCLES = 1 << 30  # half a second on a GPU of 2 GHz


def start():
    pass


def compiled():
    pass


def api():
    return torch.cuda


def device(index=0):
    if index >= torch.cuda.device_count():
        raise Skip(f"there is no GPU {index}")
    return torch.device(NAME, index)


class Driver:
    @staticmethod
    def hold(is_held):
        if is_held:
            torch.cuda._sleep(ASLEEP_CYCLES)

    @staticmethod
    def faults():
        return ""

    def capture(self, stream, is_captured):
        if is_captured:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin()
        else:
            self.graph.capture_end()


driver = Driver()
