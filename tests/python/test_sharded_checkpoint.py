#!/usr/bin/env python3
"""Sharded checkpoints of shoal.torch.DistributedDataParallel(model, optimizer=...) and ShardedDataParallel: other numbers of ranks
and either class load them, one plain file goes out and comes back, torch's own optimizers continue from it, and each misuse has
its error on all ranks."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn

warnings.filterwarnings("ignore")


def ours(module, **options):
    import shoal.torch
    return shoal.torch.DistributedDataParallel(module, **options)


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


class Net(nn.Module):
    """Buffers, a weight that is used twice, one in channels_last, a scalar, and an empty parameter."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.again = nn.Linear(12, 12, bias=False)  # before a norm, a bias has only rounding errors for gradients
        self.again.weight = self.first.weight
        self.scalar, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.convolution = nn.Conv2d(3, 12, 2)
        self.to(dtype)
        self.convolution.to(memory_format=torch.channels_last)

    def forward(self, x):
        seen = self.convolution(x.view(-1, 3, 2, 2)).flatten(1)
        return self.last(self.norm(self.again(torch.tanh(self.first(x) + seen)))) * self.scalar + self.empty.sum()


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
}


def trainer(name="AdamW", seed=1, make=Net, **options):
    """Returns a wrapped module and its optimizer."""
    module = seeded(make, seed)
    optimizer = OPTIMIZERS[name](module.parameters())
    return ours(module, optimizer=optimizer, **options), optimizer


def step_of(model, optimizer, step, dtype=torch.float32):
    """The same batch on every rank, so that results hardly depend on their number."""
    torch.manual_seed(1000 + step)
    x, y = torch.randn(8, 12).to(dtype), torch.randn(8, 4)
    optimizer.zero_grad()
    (model(x).float() - y).square().mean().backward()
    optimizer.step()


def close(found, wanted, tolerance, what=""):
    found, wanted = dict(found), dict(wanted)
    expect(found.keys() == wanted.keys(), what, found.keys() ^ wanted.keys())
    for name, value in wanted.items():
        expect(found[name].shape == value.shape, what, name)
        expect(torch.allclose(found[name].double(), value.double(), rtol=tolerance, atol=tolerance), what, name, found[name], value)


def state_of(model):
    return {name: value.detach().clone() for name, value in model.module.state_dict().items()}


@contextlib.contextmanager
def folder_of(world):
    """A new folder, the same on all ranks."""
    path = [tempfile.mkdtemp(prefix="shoal-checkpoint-") if world.rank == 0 else None]
    dist.broadcast_object_list(path, 0)
    try:
        yield path[0]
    finally:
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(path[0])


# ---- Saved by ranks, loaded by ranks -------------------------------------------------------------------------------------


def other_numbers(world):
    """Three ranks save, two load with other buffers, and both train on."""
    few = dist.new_group([0, 1], backend=ranks.BACKEND)
    for name in OPTIMIZERS:
        with folder_of(world) as folder:
            model, own = trainer(name)
            for step in range(3):
                step_of(model, own, step)
            own.param_groups[0]["lr"] = 0.02
            model.save_checkpoint(folder, 3, extra={"epoch": 7, "random": torch.get_rng_state()})
            wanted = state_of(model)
            for step in range(3, 5):
                step_of(model, own, step)
            if world.rank < 2:
                again, again_own = trainer(name, 2, process_group=few, bucket_cap_mb=0.0005)
                step_of(again, again_own, 9)
                loaded = again.load_checkpoint(folder)
                expect(loaded.step == 3 and loaded.extra["epoch"] == 7 and loaded.extra["random"].dtype is torch.uint8, loaded)
                close(state_of(again), wanted, 0, f"{name}: loaded")
                expect(again_own.param_groups[0]["lr"] == 0.02, again_own.param_groups[0])
                for step in range(3, 5):
                    step_of(again, again_own, step)
                close(state_of(again), state_of(model), 2e-6, f"{name}: continued")
                del again


def same_bits(world):
    """As many ranks continue with the bits of a run that was not interrupted."""
    for dtype, modes in ((torch.float32, {}), (torch.bfloat16, {}), (torch.float32, {"is_atomic": True, "max_norm": 1.0}),
                         (torch.float32, {"degree": 1})):
        with folder_of(world) as folder:
            model, own = trainer(make=lambda: Net(dtype), **modes)
            for step in range(3):
                step_of(model, own, step, dtype)
            model.save_checkpoint(folder, 3)
            again, again_own = trainer(seed=2, make=lambda: Net(dtype), **modes)
            again.load_checkpoint(folder, 3)
            for step in range(3, 6):
                step_of(model, own, step, dtype)
                step_of(again, again_own, step, dtype)
            close(state_of(again), state_of(model), 0, f"{dtype} {modes}")


def before_the_first_step(world):
    """A new module's values are saved and loaded, also masters."""
    with folder_of(world) as folder:
        model, _ = trainer(make=lambda: Net(torch.bfloat16))
        model.save_checkpoint(folder, 0)
        again, again_own = trainer(seed=2, make=lambda: Net(torch.bfloat16))
        again.load_checkpoint(folder)
        close(state_of(again), state_of(model), 0)
        step_of(again, again_own, 0, torch.bfloat16)


def after_changes(world):
    """Values that the program has written, and parameters that it has replaced, are saved; loading replaces them."""
    for dtype in (torch.float32, torch.bfloat16):
        def make():
            return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        with folder_of(world) as folder:
            model, own = trainer(make=make)
            step_of(model, own, 0, dtype)
            values = {name: torch.full_like(value, 0.25) for name, value in model.module.state_dict().items()}
            model.module.load_state_dict(values, assign=True)
            model.save_checkpoint(folder, 1)
            again, again_own = trainer(seed=2, make=make)
            step_of(again, again_own, 1, dtype)
            again.module.load_state_dict({name: torch.full_like(value, 0.5) for name, value in values.items()}, assign=True)
            again.load_checkpoint(folder)
            close(state_of(again), values, 0, f"{dtype}: loaded")
            for step in range(1, 3):
                step_of(model, own, step, dtype)
                step_of(again, again_own, step, dtype)
            close(state_of(again), state_of(model), 0, f"{dtype}: continued")


def keeps_few(world):
    import shoal.checkpoint
    with folder_of(world) as folder:
        model, _ = trainer()
        for step in range(1, 5):
            model.save_checkpoint(folder, step, keep=2)
        expect(shoal.checkpoint.steps(folder) == [3, 4], shoal.checkpoint.steps(folder))


# ---- Sharded parameters --------------------------------------------------------------------------------------------------


def sharded_trainer(name="AdamW", seed=1, make=Net, **options):
    import shoal.torch
    module = seeded(make, seed)
    optimizer = OPTIMIZERS[name](module.parameters())
    return shoal.torch.ShardedDataParallel(module, optimizer, **{"whole_bytes": 0, **options}), optimizer


def whole_state(model):
    """The state of a sharded module, on every rank."""
    states = [model.full_state_dict(to=rank) for rank in range(model.process_group.size())]
    return states[model.process_group.rank()]


def by_either_class(world):
    """A checkpoint of one class continues in the other; fewer ranks and other units load it too. Some units are whole."""
    few = dist.new_group([0, 1], backend=ranks.BACKEND)
    for name in OPTIMIZERS:
        with folder_of(world) as folder:
            model, own = sharded_trainer(name)
            for step in range(3):
                step_of(model, own, step)
            own.param_groups[0]["lr"] = 0.02
            model.save_checkpoint(folder, 3, extra={"epoch": 7})
            wanted = whole_state(model)
            ddp, ddp_own = trainer(name, 2)
            expect(ddp.load_checkpoint(folder) == (3, {"epoch": 7}) and ddp_own.param_groups[0]["lr"] == 0.02, ddp_own.param_groups[0])
            close(state_of(ddp), wanted, 0, f"{name}: by the reduction")
            ddp.save_checkpoint(folder, 4)
            if world.rank < 2:
                again, again_own = sharded_trainer(name, 2, process_group=few, whole_bytes=300, shard_weights=(1, 3))
                step_of(again, again_own, 9)
                again.load_checkpoint(folder, 4)
                close(whole_state(again), wanted, 0, f"{name}: by two ranks")
            for step in range(3, 5):
                step_of(model, own, step)
                step_of(ddp, ddp_own, step)
                if world.rank < 2:
                    step_of(again, again_own, step)
            found = whole_state(model)
            close(state_of(ddp), found, 2e-6, f"{name}: continued in the reduction")
            if world.rank < 2:
                close(whole_state(again), found, 2e-6, f"{name}: continued by two ranks")


def same_bits_sharded(world):
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"whole_bytes": 300}), (torch.float32, {"max_norm": 1.0})):
        with folder_of(world) as folder:
            model, own = sharded_trainer(make=lambda: Net(dtype), **options)
            for step in range(3):
                step_of(model, own, step, dtype)
            model.save_checkpoint(folder, 3, keep=1)
            again, again_own = sharded_trainer(seed=2, make=lambda: Net(dtype), **options)
            again.load_checkpoint(folder, 3)
            for step in range(3, 6):
                step_of(model, own, step, dtype)
                step_of(again, again_own, step, dtype)
            close(whole_state(again), whole_state(model), 0, f"{dtype} {options}")


def refuses_sharded(world):
    """After an error a module trains on; a graph from before a load is refused."""
    with folder_of(world) as folder:
        model, own = sharded_trainer()
        step_of(model, own, 0)
        message_of(RuntimeError, lambda: model.load_checkpoint(folder), "has no complete checkpoint")
        message_of(ValueError, lambda: model.load_checkpoint("\ud800"), "surrogates not allowed")  # a UnicodeEncodeError on rank 0
        model.save_checkpoint(folder, 1)
        message_of(Exception, lambda: sharded_trainer("Adagrad")[0].load_checkpoint(folder), "another optimizer", "SHOAL_ADAMW")
        loss = model(torch.ones(8, 12)).sum()
        model.load_checkpoint(folder)
        message_of(RuntimeError, loss.backward, "before optimizer.step() or load_checkpoint()")
        message_of(ValueError, lambda: sharded_trainer(shard_weights=[1.0] * 9), f"9 numbers, but {world.size} ranks")
        step_of(model, own, 1)


# ---- One plain file ------------------------------------------------------------------------------------------------------


def on_first(world, function):
    """Runs the function on rank 0; the others wait for it."""
    if world.rank == 0:
        function()
    dist.barrier()


def whole_for_torch(world):
    """torch's own module and optimizer continue from one file, and the file becomes a checkpoint again."""
    import shoal.checkpoint
    for name in OPTIMIZERS:
        with folder_of(world) as folder:
            path = f"{folder}/all.pt"
            model, own = trainer(name)
            for step in range(3):
                step_of(model, own, step)
            model.save_checkpoint(folder, 3, extra=[1, 2])
            on_first(world, lambda: shoal.checkpoint.to_torch(folder, path))
            whole = torch.load(path)
            theirs = seeded(Net, 3)
            other = OPTIMIZERS[name](theirs.parameters())
            theirs.load_state_dict(whole["model"])
            other.load_state_dict(whole["optimizer"])
            expect(whole["step"] == 3 and whole["extra"] == [1, 2], whole["extra"])
            on_first(world, lambda: shoal.checkpoint.from_torch(path, f"{folder}/back", 4))
            again, again_own = trainer(name, 2)
            expect(again.load_checkpoint(f"{folder}/back") == (4, [1, 2]), "extra")
            for step in range(3, 6):
                step_of(model, own, step)
                step_of(theirs, other, step)
                step_of(again, again_own, step)
            close(state_of(again), state_of(model), 0, f"{name}: from the file")
            close(theirs.state_dict(), state_of(model), 2e-6, f"{name}: by torch")


def whole_of_torch(world):
    """A file of torch's own optimizer, without names, becomes a checkpoint."""
    import shoal.checkpoint
    make = lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))  # noqa: E731
    for name in ("AdamW", "SGD, momentum", "Adagrad"):
        with folder_of(world) as folder:
            theirs = seeded(make)
            other = OPTIMIZERS[name](theirs.parameters())
            for step in range(3):
                step_of(theirs, other, step)

            def convert():
                torch.save({"model": theirs.state_dict(), "optimizer": other.state_dict()}, f"{folder}/theirs.pt")
                shoal.checkpoint.from_torch(f"{folder}/theirs.pt", folder, 3)
            on_first(world, convert)
            model, own = trainer(name, 2, make)
            model.load_checkpoint(folder)
            for step in range(3, 6):
                step_of(model, own, step)
                step_of(theirs, other, step)
            close(state_of(model), theirs.state_dict(), 2e-6, name)


def safetensors(world):
    """One file of values goes out and comes back, in each type; the optimizer then begins anew."""
    import shoal.checkpoint
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        with folder_of(world) as folder:
            path = f"{folder}/model.safetensors"
            model, own = trainer(make=lambda: Net(dtype))
            step_of(model, own, 0, dtype)
            model.save_checkpoint(folder, 1)
            on_first(world, lambda: shoal.checkpoint.to_safetensors(folder, path))
            close(read_safetensors(path), state_of(model), 0, f"{dtype}: the file")
            on_first(world, lambda: shoal.checkpoint.from_safetensors(path, f"{folder}/back", 5))
            again, again_own = trainer(seed=2, make=lambda: Net(dtype))
            step_of(again, again_own, 1, dtype)
            expect(again.load_checkpoint(f"{folder}/back").step == 5, "step")
            close(state_of(again), state_of(model), 0, f"{dtype}: back")
            fresh, fresh_own = trainer(seed=2, make=lambda: Net(dtype))
            fresh.module.load_state_dict(state_of(model))
            step_of(again, again_own, 2, dtype)
            step_of(fresh, fresh_own, 2, dtype)
            close(state_of(again), state_of(fresh), 0, f"{dtype}: anew")


def read_safetensors(path):
    """By the library if it is there; else as its documentation describes the format."""
    try:
        from safetensors.torch import load_file
        return load_file(path)
    except ImportError:
        raw = pathlib.Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    kinds = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
    found = {}
    for name, each in json.loads(raw[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = each["data_offsets"]
            data = bytearray(raw[8 + length + begin:8 + length + end])
            flat = torch.frombuffer(data, dtype=kinds[each["dtype"]]) if data else torch.empty(0)
            found[name] = flat.view(each["shape"])
    return found


# ---- Errors --------------------------------------------------------------------------------------------------------------


def message_of(kind, call, *words):
    try:
        call()
    except kind as error:
        text = str(error)
        expect(text.startswith("shoal: ") and all(word in text for word in words), text)
        return
    raise AssertionError(f"no {kind.__name__} with {words}")


def refuses(world):
    def wide():
        net = Net()
        net.last.weight = nn.Parameter(torch.zeros(6, 8))
        return net

    def rows():
        return Net().to(memory_format=torch.contiguous_format)

    def two_groups(parameters):
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    with folder_of(world) as folder:
        model, own = trainer()
        message_of(RuntimeError, lambda: model.load_checkpoint(folder), "has no complete checkpoint")
        message_of(RuntimeError, lambda: model.load_checkpoint(f"{folder}/none"), "cannot read the folder")
        message_of(TypeError, lambda: model.save_checkpoint(folder, 1, extra=pathlib.Path()), "extra may hold tensors")
        model.save_checkpoint(folder, 1)
        message_of(Exception, lambda: model.save_checkpoint(folder, 1), "is a complete checkpoint already")
        before = state_of(model)
        message_of(ValueError, lambda: trainer(make=wide)[0].load_checkpoint(folder), "last.weight has the shape [4, 12] there, and [6, 8]")
        message_of(ValueError, lambda: trainer(make=rows)[0].load_checkpoint(folder), "memory format", "memory_format=...")
        message_of(Exception, lambda: trainer("Adagrad")[0].load_checkpoint(folder), "another optimizer", "SHOAL_ADAMW")
        module = Net()
        grouped = ours(module, optimizer=two_groups(module.parameters()))
        message_of(ValueError, lambda: grouped.load_checkpoint(folder), "its groups have [10] parameters, and this one's [1, 9]")
        message_of(RuntimeError, lambda: ours(Net()).save_checkpoint(folder, 2), "modules with optimizer=")
        for shard in (0, 1):  # in what the program has added, and in a value
            path = next(pathlib.Path(folder).glob(f"step-*/shard-0000{shard}*"))
            on_first(world, lambda: flip(path, -3))
            message_of(Exception, lambda: model.load_checkpoint(folder), path.name, "was changed")
            on_first(world, lambda: flip(path, -3))
        close(state_of(model), before, 0, "after a refusal")
        step_of(model, own, 0)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


# ---- The command ---------------------------------------------------------------------------------------------------------


def shoal_checkpoint(*words, options=()):
    command = [sys.executable, *options, "-m", "shoal", "checkpoint", *map(str, words)]
    # From the root folder: `-m` imports from the working folder too, and build/torch would be found as a package.
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout, result.stderr


def command(world):
    with folder_of(world) as folder:
        model, own = trainer()
        step_of(model, own, 0)
        model.save_checkpoint(folder, 1)
        model.save_checkpoint(folder, 2)
        code, out, err = shoal_checkpoint("list", folder)
        expect(code == 0 and len(out.splitlines()) == 2 and "step 2: saved " in out and "1 shard, " in out and "AdamW" in out, out, err)
        found = json.loads(shoal_checkpoint("list", folder, "--json")[1])
        expect([each["step"] for each in found] == [1, 2] and found[0]["parameters"] == 10, found)
        code, out, err = shoal_checkpoint("show", folder, "--step", 1, "--verify")
        expect(code == 0 and "all checksums are right" in out and "convolution.weight" in out and "[12, 3, 2, 2]" in out, out, err)
        shown = json.loads(shoal_checkpoint("show", folder, "--json")[1])
        expect(shown["step"] == 2 and {"name": "scalar", "type": "F32", "shape": [], "steps": 1, "states": 2} in shown["parameters"], shown)
        plain, both, back = f"{folder}/one.safetensors", f"{folder}/one.pt", f"{folder}/back"
        expect(shoal_checkpoint("whole", folder, plain) == (0, f"{plain}: step 2\n", ""), "whole")
        expect(json.loads(shoal_checkpoint("whole", folder, both, "--step", 1, "--json")[1]) == {"file": both, "step": 1}, "whole")
        close(read_safetensors(plain), state_of(model), 0)
        close(torch.load(both)["model"], state_of(model), 0)
        expect(shoal_checkpoint("shard", plain, back, "--step", 8) == (0, f"{back}: step 8\n", ""), "shard")
        expect(shoal_checkpoint("shard", both, back) == (0, f"{back}: step 1\n", ""), "shard")
        expect(model.load_checkpoint(back, 8).step == 8 and model.load_checkpoint(back, 1).step == 1, "loads")


def command_without_packages(world):
    """Listing and reading need neither NumPy nor PyTorch."""
    with folder_of(world) as folder:
        model, _ = trainer()
        model.save_checkpoint(folder, 1)
        for words, wanted, part in ((["list", folder], 0, "step 1"), (["show", folder, "--verify"], 0, "all checksums are right"),
                                    (["whole", folder, f"{folder}/one.safetensors"], 1, "pip install numpy"),
                                    (["whole", folder, f"{folder}/one.pt"], 1, "No module named 'torch'")):
            code, out, err = shoal_checkpoint(*words, options=["-S"])
            expect(code == wanted and part in out + err and "Traceback" not in err, words, code, out, err)


def command_errors(world):
    with folder_of(world) as folder:
        model, _ = trainer()
        model.save_checkpoint(folder, 1)
        path = next(pathlib.Path(folder).glob("step-*/shard-*"))

        def says(words, wanted, *parts):
            code, out, err = shoal_checkpoint(*words)
            expect(code == wanted and all(part in out + err for part in parts) and "Traceback" not in err, code, out, err)
        says(["list", f"{folder}/none"], 1, "cannot read the folder")
        says(["show", folder, "--step", "9"], 1, "step 9: complete is missing")
        says(["show", folder, "--step", "-1"], 2, "steps are numbers from 0")
        says(["show", folder, "--step", str(1 << 70)], 2, "steps are numbers from 0")
        says(["whole", folder, "model.bin.gz"], 2, "must end with .safetensors")
        says(["frobnicate"], 2, "invalid choice")
        says([], 2, "usage")
        says(["--help"], 0, "any number of ranks loads it", "Exit codes")
        says(["shard", f"{folder}/none.safetensors", folder], 1, "No such file")
        pathlib.Path(f"{folder}/torn.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{}")
        says(["shard", f"{folder}/torn.safetensors", folder], 1, "is not a safetensors file, or was cut short")
        pathlib.Path(f"{folder}/torn.pt").write_bytes(b"PK")
        says(["shard", f"{folder}/torn.pt", folder], 1, "is not a file of torch.save")
        says(["whole", folder, f"{folder}/none/model.safetensors"], 1, "No such file")
        expect(not list(pathlib.Path(folder).glob("*.partial")), "a temporary file is left")
        flip(path, 1800)  # in a value of first.weight
        says(["list", folder], 0, "step 1")
        says(["show", folder, "--verify"], 1, "was changed")
        says(["whole", folder, f"{folder}/model.safetensors"], 1, "was changed")
        expect(not os.path.exists(f"{folder}/model.safetensors") and not list(pathlib.Path(folder).glob("*.partial")), "a file is left")
        path.unlink()
        says(["list", folder], 1, "damaged", "is missing")


CASES = [Case(body.__name__, body, sizes=(1, 2, 3)) for body in (same_bits, same_bits_sharded)]
CASES += [Case("other_numbers", other_numbers, sizes=(3,), fresh=True), Case("by_either_class", by_either_class, sizes=(3,), fresh=True)]
CASES += [Case(body.__name__, body, sizes=(2,)) for body in (before_the_first_step, after_changes, keeps_few, whole_for_torch, whole_of_torch, safetensors,
                                                             refuses, refuses_sharded)]
CASES += [Case(body.__name__, body, sizes=(1,)) for body in (command, command_without_packages, command_errors)]

if __name__ == "__main__":
    ranks.run(CASES)
