"""One rank of a training in PyTorch through a front-end that bench/bench_front_ends.py times:

    front_end_torch.py CONTESTANT [--steps N]         under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT

CONTESTANT: ddp (torch's DistributedDataParallel on the back-end "shoal"), shoal-ddp (Shoal's own), horovod
(shoal.horovod.torch.DistributedOptimizer), accelerate, lightning. All train one network of 13 million parameters on one
batch each, with SGD. A step lasts from its beginning to the beginning of the next. Rank 0 prints a JSON object."""
import argparse
import json
import time
from statistics import median

import torch
import torch.distributed as dist

import shoal.torch

WARMUPS = 5
WIDTH, LAYERS, SAMPLES = 1024, 12, 32


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(*(part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())))


def batch():
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def plain_loop(model, optimizer, backward, steps):
    """Returns when each step began, and when the last ended."""
    inputs, moments = batch(), []
    for _ in range(WARMUPS + steps):
        moments.append(time.perf_counter())
        optimizer.zero_grad()
        backward(model(inputs).square().mean())
        optimizer.step()
    return [*moments, time.perf_counter()]


def with_ddp(steps):
    model = torch.nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=True)
    return plain_loop(model, sgd(model), torch.Tensor.backward, steps)


def with_shoal_ddp(steps):
    model = shoal.torch.DistributedDataParallel(network())
    return plain_loop(model, sgd(model), torch.Tensor.backward, steps)


def with_horovod(steps):
    import shoal.horovod.torch as hvd
    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return plain_loop(model, optimizer, torch.Tensor.backward, steps)


def with_accelerate(steps):
    import accelerate
    handlers = [accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=handlers)
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    return plain_loop(model, optimizer, accelerator.backward, steps)


def with_lightning(steps):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    inputs, moments = batch(), []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, rows, _):
            return self.network(inputs).square().mean()

        def configure_optimizers(self):
            return sgd(self)

        def on_train_batch_start(self, *_):
            moments.append(time.perf_counter())

    rows = torch.utils.data.DataLoader(torch.zeros(WARMUPS + steps + 1, 1))
    trainer = lightning.Trainer(accelerator="cpu", devices=dist.get_world_size(), max_epochs=1, logger=False,
                                strategy=DDPStrategy(process_group_backend="shoal", gradient_as_bucket_view=True),
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                use_distributed_sampler=False)
    trainer.fit(Module(), rows)
    return moments


CONTESTANTS = {"ddp": with_ddp, "shoal-ddp": with_shoal_ddp, "horovod": with_horovod, "accelerate": with_accelerate,
               "lightning": with_lightning}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    moments = CONTESTANTS[options.contestant](options.steps)[WARMUPS:]
    took = torch.tensor([after - before for before, after in zip(moments, moments[1:])], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        took = [round(1e3 * one, 3) for one in took.tolist()]
        print(json.dumps({"contestant": options.contestant, "step_ms": median(took), "steps_ms": took}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
