#!/usr/bin/env python3
"""Scripts for GPUs as SageMaker and the frameworks publish them, with the one line that chooses Shoal: SMDDP's backend,
"cuda:shoal", FSDP1, DeepSpeed, Accelerate, Hugging Face Trainer, Lightning. Two ranks train on half a batch each, on a device,
and end with the parameters of one process that trains on the whole batch on the CPU.

With SHOAL_TEST_CUDA the device is a GPU of this machine, and the Python needs a torch that is built for CUDA (make test-gpu).
Otherwise it is the stand-in of test_device.py. No framework knows that device, so the functions
there_of_* select it in each framework; all the rest of the framework's code for devices runs."""
import importlib.util
import os
import pathlib
import sys
import tempfile
import warnings

import ranks

os.environ.setdefault("MOCK_CUDA", "late=20,devices=2")  # read when a rank loads the driver
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from ranks import Case, Skip, expect  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

sys.path.insert(1, str(pathlib.Path(__file__).with_name("device")))
sys.path.insert(1, str(ranks.TOP / "python/smdistributed"))
IS_REAL = "SHOAL_TEST_CUDA" in os.environ
if IS_REAL:
    import real_cuda as stand_in  # noqa: E402
    ranks.START = "spawn"
else:
    import stand_in  # noqa: E402
    import torch._dynamo  # noqa: E402, F401: else each rank's first optimizer imports it, in two seconds
ranks.SHIMS = [shim for shim in ranks.SHIMS if shim == "c++"]  # the shim that supports devices

# The frameworks, and the models and data that are trained with them on the CPU.
HAS_TRAINERS = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers", "lightning"))
if HAS_TRAINERS:
    import test_trainers as trainers  # noqa: E402
SIZE, SAMPLES, STEPS, RATE, NEAR = 2, 8, 5, 0.1, 1e-4


def load_backend():
    stand_in.start()
    import shoal.torch  # noqa: F401


ranks.load_backend = load_backend


def device_of(world):
    """Selects this rank's device, as scripts do with their LOCAL_RANK. Ranks share a single GPU."""
    api = stand_in.api()
    where = stand_in.device(int(os.environ["LOCAL_RANK"]) % api.device_count())
    api.set_device(where)
    return where


# ---- The problem ----


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(part=slice(None), device="cpu"):
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(SAMPLES, width, generator=generator)[part].to(device) for width in (12, 4))


def mine(world):
    share = SAMPLES // world.size
    return slice(world.rank * share, (world.rank + 1) * share)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def train(model, optimizer, data):
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()


def expect_as_alone(parameters):
    """Compares with one process on the CPU that trains on the whole batch."""
    alone = network()
    train(alone, sgd(alone), batch())
    for ours, theirs in zip(parameters, alone.parameters(), strict=True):
        expect(ours.device.type == stand_in.NAME, f"a parameter is on {ours.device}")
        expect(torch.allclose(ours.detach().cpu(), theirs, rtol=0, atol=NEAR), ours, theirs)


# ---- Torch's own classes ----


def ddp_script(world, backend):
    dist.init_process_group(backend)
    where = device_of(world)
    model = DistributedDataParallel(network().to(where), device_ids=[where.index])
    train(model, sgd(model), batch(mine(world), where))
    expect_as_alone(model.parameters())


def smddp_script(world):
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    ddp_script(world, "smddp")
    expect(dist.get_backend() == "smddp", dist.get_backend())


def smddp_before_1_4(world):
    """The vendor's own class and names, as in its first examples."""
    import smdistributed.dataparallel.torch.distributed as smdist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as Ours
    smdist.init_process_group()
    where = device_of(world)
    model = Ours(network().to(where))
    train(model, sgd(model), batch(mine(world), where))
    expect_as_alone(model.parameters())
    smdist.barrier()


def named_device_script(world):
    ddp_script(world, f"{stand_in.NAME}:shoal")


def both_devices_script(world):
    """Metrics and objects of the CPU go over Gloo, gradients over Shoal."""
    ddp_script(world, f"cpu:gloo,{stand_in.NAME}:shoal")
    count = torch.ones(1)
    dist.all_reduce(count)
    expect(count.item() == world.size, count)


def fsdp1_script(world, strategy):
    dist.init_process_group(f"{stand_in.NAME}:shoal")
    where = device_of(world)
    options = {"device_id": where, "sharding_strategy": strategy, "use_orig_params": True}
    parts = [FullyShardedDataParallel(layer, **options) if isinstance(layer, nn.Linear) else layer
             for layer in network().to(where)]
    model = FullyShardedDataParallel(nn.Sequential(*parts), **options)
    train(model, sgd(model), batch(mine(world), where))
    with FullyShardedDataParallel.summon_full_params(model):
        expect_as_alone([parameter.clone() for parameter in model.parameters()])


def fsdp1_full(world):
    fsdp1_script(world, ShardingStrategy.FULL_SHARD)


def fsdp1_gradients(world):
    fsdp1_script(world, ShardingStrategy.SHARD_GRAD_OP)


# ---- DeepSpeed ----


def there_of_deepspeed(where):
    """Selects DeepSpeed's accelerator. That of the stand-in is DeepSpeed's for the CPU with another device."""
    from deepspeed.accelerator import cpu_accelerator, set_accelerator

    class StandInAccelerator(cpu_accelerator.CPU_Accelerator):
        def device_name(self, device_index=None):
            return stand_in.NAME if device_index is None else f"{stand_in.NAME}:{device_index}"

        def current_device(self):
            return where.index

        def current_device_name(self):
            return str(where)

        def set_device(self, device_index):
            stand_in.api().set_device(device_index)

        def device_count(self):
            return stand_in.api().device_count()

        def synchronize(self, device_index=None):
            stand_in.api().synchronize()

        def on_accelerator(self, tensor):
            return tensor.device.type == stand_in.NAME

    if not IS_REAL:
        set_accelerator(StandInAccelerator())
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # as in test_deepspeed.py


def deepspeed_script(world, stage):
    if not importlib.util.find_spec("deepspeed"):
        raise Skip("DeepSpeed is not installed")
    import deepspeed
    import deepspeed.comm.torch
    where = device_of(world)
    there_of_deepspeed(where)
    deepspeed.init_distributed(dist_backend="shoal")
    model = network().to(where)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config={
        "train_micro_batch_size_per_gpu": SAMPLES // world.size, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True})
    x, y = batch(mine(world), where)
    for _ in range(STEPS):
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        expect_as_alone(engine.module.parameters())


def deepspeed_gradients(world):
    deepspeed_script(world, 2)


def deepspeed_full(world):
    deepspeed_script(world, 3)


# ---- Accelerate, Trainer, Lightning ----


def expect_trained(losses, model, expected, reference):
    expect(len(losses) == len(expected) and losses[-1] < losses[0], losses, expected)
    expect(all(abs(one - other) <= 5 * NEAR for one, other in zip(losses, expected)), losses, expected)
    for (name, one), other in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        expect(one.device.type == stand_in.NAME, f"{name} is on {one.device}")
        expect(torch.allclose(one.detach().cpu(), other[1], rtol=0, atol=NEAR), name, one, other)


def there_of_accelerate(where):
    """Returns the arguments of Accelerator. The stand-in takes the place of the CPU in Accelerate's state, which Trainer also
    uses."""
    from accelerate import PartialState
    if IS_REAL:
        return {}
    PartialState(cpu=True)
    PartialState._shared_state["device"] = where
    return {"cpu": True}


def there_of_trainer(where):
    """Returns the class of Trainer's arguments, and those that choose the device. The stand-in has no pinned memory, which
    torch's class uses to find unused parameters."""
    class StandInArguments(trainers.transformers.TrainingArguments):
        @property
        def _setup_devices(self):
            super()._setup_devices
            there_of_accelerate(where)
            return where

    if IS_REAL:
        return trainers.transformers.TrainingArguments, {}
    return StandInArguments, {"use_cpu": True, "ddp_find_unused_parameters": False}


def accelerate_script(world):
    reference, data, losses = trainers.network(), trainers.samples(), []
    expected = trainers.alone(reference, trainers.squares, data.tensors)
    dist.init_process_group("shoal")
    where = device_of(world)
    accelerator = trainers.accelerate.Accelerator(**there_of_accelerate(where))
    model = trainers.network().to(where)
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES // world.size)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    for _ in range(STEPS):
        for rows in loader:
            optimizer.zero_grad()
            loss = trainers.squares(model, rows)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    expect(isinstance(model, DistributedDataParallel), type(model))
    expect_trained(losses, accelerator.unwrap_model(model), expected, reference)


def trainer_script(world):
    reference, texts = trainers.gpt(), trainers.Texts()
    expected = trainers.alone(
        reference, lambda model, rows: model(input_ids=rows, labels=rows, num_items_in_batch=rows.numel()).loss, texts.rows)
    dist.init_process_group("shoal")
    where = device_of(world)
    model = trainers.gpt().to(where)
    model.tie_weights()  # a move to the stand-in makes new parameters
    arguments_class, chosen = there_of_trainer(where)
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_class(
            folder, **chosen, num_train_epochs=STEPS, per_device_train_batch_size=SAMPLES // world.size, max_grad_norm=0.0,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True)
        optimizer = sgd(model)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = trainers.transformers.Trainer(model, arguments, train_dataset=texts, optimizers=(optimizer, constant))
        trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    expect_trained(losses, model, expected, reference)


def there_of_lightning(world):
    """Returns Lightning's accelerator and strategy. The stand-in has an accelerator of its own, as Lightning's manual
    describes, and no stream of torch.cuda, which Lightning makes if it passes the device's number to torch's class."""
    name = f"{stand_in.NAME}:shoal"
    if IS_REAL:
        return {"accelerator": "gpu", "strategy": trainers.DDPStrategy(process_group_backend=name)}

    class StandInAccelerator(trainers.lightning.pytorch.accelerators.CPUAccelerator):
        def setup_device(self, device):
            stand_in.api().set_device(device)

        @staticmethod
        def parse_devices(devices):
            return devices

        @staticmethod
        def get_parallel_devices(devices):
            return [stand_in.device(index) for index in range(devices)]

    class StandInStrategy(trainers.DDPStrategy):
        def determine_ddp_device_ids(self):
            return None

    return {"accelerator": StandInAccelerator(), "strategy": StandInStrategy(process_group_backend=name)}


def lightning_script(world):
    reference, data, module = trainers.network(), trainers.samples(), trainers.Module()
    expected = trainers.alone(reference, trainers.squares, data.tensors)
    if IS_REAL and torch.cuda.device_count() < world.size:
        raise Skip("Lightning gives each rank a GPU of its own, and this machine has fewer")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainers.lightning.Trainer(
            **there_of_lightning(world), devices=world.size, max_epochs=STEPS, default_root_dir=folder, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=SAMPLES // world.size))
    module = module.to(device_of(world))  # Lightning moves it back to the CPU
    expect_trained(module.losses, module.network, expected, reference)


def without_faults(body):
    """The stand-in's driver reports uses that a real driver would not survive."""
    def there(world):
        if body in (accelerate_script, trainer_script, lightning_script) and not HAS_TRAINERS:
            raise Skip("Accelerate, Transformers or Lightning is not installed (dev/venv/trainers.txt)")
        body(world)
        stand_in.api().synchronize()
        expect(not stand_in.driver.faults(), stand_in.driver.faults())
    there.__name__ = body.__name__
    return there


warnings.filterwarnings("ignore")
CASES = [Case(body.__name__, without_faults(body), sizes=(SIZE,), init=False, fresh=True, timeout_s=300) for body in (
    smddp_script, smddp_before_1_4, named_device_script, both_devices_script, fsdp1_full, fsdp1_gradients, deepspeed_gradients,
    deepspeed_full, accelerate_script, trainer_script, lightning_script)]


def why_not():
    if not IS_REAL:
        return ""
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA: name a Python with a build for CUDA by SHOAL_TEST_PYTHON"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


if __name__ == "__main__":
    if why_not():
        print("1..0 # SKIP", why_not())
        sys.exit()
    if os.fork() == 0:  # compiles in a child, so that no rank waits for a compiler and this process loads nothing
        stand_in.compiled()
        os._exit(0)
    os.wait()
    ranks.run(CASES)
