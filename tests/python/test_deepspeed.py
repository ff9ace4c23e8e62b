#!/usr/bin/env python3
"""DeepSpeed's engines over the back-end: ZeRO of every stage, its mixture of experts and its pipeline train as one process
does. They call functions of torch.distributed that torch itself never calls."""
import contextlib
import os
import sys
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
from ranks import Case, expect
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore")
try:
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule
except ImportError as error:
    print(f"1..0 # SKIP no DeepSpeed: {error}")
    raise SystemExit(0)

with contextlib.suppress(ImportError):  # else each rank compiles its functions; older versions lack it
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
# Only inference uses it. Without this, each rank makes torch compile it into a folder of the user's.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
BATCH = 24
STEPS = 4


def layers():
    """Returns layers, each of which can be a stage."""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(12, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)]


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(BATCH, 12, generator=generator), torch.randn(BATCH, 4, generator=generator)


def share(world):
    return (tensor.chunk(world.size)[world.rank] for tensor in batch())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trained_alone():
    model = nn.Sequential(*layers())
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch()[0]), batch()[1]).backward()
        optimizer.step()
    return model


def configuration(world, **more):
    return {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // world.size, "steps_per_print": 1 << 30,
            "zero_allow_untested_optimizer": True, **more}


def compare(ours, theirs, tolerance, *told):
    ours, theirs = list(ours), list(theirs)
    expect(len(ours) == len(theirs), *told, len(ours), len(theirs))
    for one, other in zip(ours, theirs):
        worst = (one.detach().float() - other.detach()).abs().max().item()
        expect(one.shape == other.shape and worst <= tolerance, *told, f"differs by {worst}, of which {tolerance} is allowed")


# ---- ZeRO: (name, configuration of ZeRO, further configuration of the engine, tolerance) ----

SMALL = {"reduce_bucket_size": 200, "allgather_bucket_size": 200}
ZERO = (
    ("stage 0", {"stage": 0}, {}, 1e-5),
    ("stage 1", {"stage": 1}, {}, 1e-5),
    ("stage 2", {"stage": 2, **SMALL}, {}, 1e-5),
    ("stage 2, all-reduce", {"stage": 2, "reduce_scatter": False, "overlap_comm": False}, {}, 1e-5),
    ("stage 2, bfloat16 on the wire", {"stage": 2}, {"communication_data_type": "bf16"}, 2e-2),
    ("stage 3", {"stage": 3, "stage3_param_persistence_threshold": 0}, {}, 1e-5),
    ("stage 3, small buckets", {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 200,
                                "stage3_max_live_parameters": 300, **SMALL}, {}, 1e-5),
    ("stage 3, clipped at nothing", {"stage": 3}, {"gradient_clipping": 1e6}, 1e-5),
)


def zero(world):
    x, y = share(world)
    for name, stage, more, tolerance in ZERO:
        model = nn.Sequential(*layers())
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()),
                                          config=configuration(world, zero_optimization=stage, **more))
        for _ in range(STEPS):
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage["stage"] == 3):
            compare(model.parameters(), trained_alone().parameters(), tolerance, name)
        print(f"{name} is right")


def begun_by_deepspeed(world):
    """deepspeed.init_distributed makes the group: the only line of a script that changes."""
    deepspeed.init_distributed(dist_backend="shoal")
    expect(torch.distributed.get_backend() == "shoal", torch.distributed.get_backend())
    x, y = share(world)
    model = nn.Sequential(*layers())
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()),
                                      config=configuration(world, zero_optimization={"stage": 1}))
    for _ in range(STEPS):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    compare(model.parameters(), trained_alone().parameters(), 1e-5)


# ---- Mixture of experts ----


class OfExperts(nn.Module):
    """Each expert is a layer. Tokens travel by all-to-all to the rank with their expert, and back."""

    def __init__(self, ranks_of_experts):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 8)
        self.experts = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=ranks_of_experts, k=1, min_capacity=1, capacity_factor=4.0,
                           use_rts=False)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.experts(torch.tanh(self.first(x)))[0])


def experts(world):
    """The experts of all ranks together produce the output of one rank with all experts."""
    x, y = share(world)
    answers = []
    for ranks_of_experts in (1, world.size):
        model = OfExperts(ranks_of_experts)
        for number, expert in enumerate(model.experts.deepspeed_moe.experts.deepspeed_experts):
            whole = number + (world.rank * 4 // world.size if ranks_of_experts > 1 else 0)
            torch.manual_seed(100 + whole)
            with torch.no_grad():
                for parameter in expert.parameters():
                    parameter.normal_()
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=configuration(world))
        losses = []
        for _ in range(STEPS):
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        answers.append(torch.tensor(losses))
    compare(answers[1:], answers[:1], 1e-5, *answers)


# ---- Pipeline ----


def pipeline(world):
    deepspeed.init_distributed()  # uses the existing group
    module = PipelineModule(layers=layers(), num_stages=world.size, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    micro = BATCH // 4
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=sgd(module.parameters()),
        config={**configuration(world), "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 4})
    pieces = list(zip(*(tensor.split(micro) for tensor in batch())))
    for _ in range(STEPS):
        engine.train_batch(data_iter=iter(pieces))
    for number, layer in enumerate(module.forward_funcs, module._local_start):
        compare(layer.parameters(), trained_alone()[number].parameters(), 1e-5, number)


CASES = [Case("ZeRO", zero, sizes=(1, 2, 4), fresh=True, timeout_s=300)]
CASES += [Case("begun by DeepSpeed", begun_by_deepspeed, sizes=(2,), init=False, fresh=True)]
CASES += [Case("mixture of experts", experts, sizes=(1, 2, 4), fresh=True)]
CASES += [Case("pipeline", pipeline, sizes=(2, 4), fresh=True)]

if __name__ == "__main__":
    ranks.run(CASES)
