#!/usr/bin/env python3
"""shoal.torch.SyncBatchNorm: every rank against one process on the whole batch; refusals; the warning when batch norm is
local and a worker's batch is small."""
import copy
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect

warnings.filterwarnings("error", category=FutureWarning)  # the layer calls nothing that torch will remove soon
CHANNELS = 5
NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}
SHAPES = {"1d": (), "1d in time": (6,), "2d": (4, 3), "3d": (2, 3, 2)}


def batch(shape, dtype, counts):
    """Returns a batch of all ranks, which each rank can compute, and its parts. Its mean is far from 0."""
    torch.manual_seed(1)
    whole = (3 + torch.randn(sum(counts), CHANNELS, *shape, dtype=torch.float64)).to(dtype)
    return whole, whole.split(counts)


def same(one, other, dtype, what):
    one, other = one.detach().double(), other.detach().double()
    scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
    far = (one - other).abs().max().item() / scale if other.numel() else 0.0
    expect(one.shape == other.shape and far <= NEAR[dtype], f"{what}: {far} from one process's")


def trained(model, x):
    """Trains three steps. Returns the last output and the gradient of the input."""
    for _ in range(3):
        x = x.detach().requires_grad_()
        model.zero_grad()
        y = model(x)
        torch.manual_seed(3)
        pattern = torch.randn(64, *y.shape[1:], dtype=torch.float64)
        yield x, y, pattern


def compare(world, plain, synced, whole, parts, dtype):
    first = sum(len(part) for part in parts[:world.rank])
    mine = slice(first, first + len(parts[world.rank]))
    for (x, y, pattern), (mine_x, mine_y, _) in zip(trained(plain, whole), trained(synced, parts[world.rank])):
        (y.double() * pattern[:len(y)]).sum().backward()
        (mine_y.double() * pattern[mine]).sum().backward()
        same(mine_y, y[mine], dtype, "output")
        same(mine_x.grad, x.grad[mine], dtype, "gradient of the input")
        for name, parameter in plain.named_parameters():
            total = dict(synced.named_parameters())[name].grad.double()
            dist.all_reduce(total)
            same(total, parameter.grad, dtype, f"gradient of {name}")
    for name, buffer in plain.named_buffers():
        same(dict(synced.named_buffers())[name], buffer, dtype, name)
    synced.eval(), plain.eval()
    same(synced(whole), plain(whole), dtype, "output of eval")


def exact_case(name, counts_of, dtype=torch.float64, shape=(4, 3), **options):
    def body(world):
        whole, parts = batch(shape, dtype, counts_of(world.size))
        class_ = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}[len(shape)]
        import shoal.torch
        torch.manual_seed(2)
        plain = class_(CHANNELS, dtype=dtype, **options)
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter)
        synced = shoal.torch.convert_sync_batchnorm(copy.deepcopy(plain))
        expect(type(synced) is shoal.torch.SyncBatchNorm and synced.state_dict().keys() == plain.state_dict().keys())
        compare(world, plain, synced, whole, parts, dtype)
    return Case(f"as one process: {name}", body, sizes=(1, 2, 3))


def even(size):
    return [4] * size


def uneven(size):
    return [2 + 3 * rank for rank in range(size)]


def one_empty(size):
    return [0 if rank == 1 else 5 for rank in range(size)]


def nothing_at_all(world):
    import shoal.torch
    try:
        shoal.torch.SyncBatchNorm(CHANNELS)(torch.empty(0, CHANNELS))
        raise AssertionError("an empty batch was normalized")
    except ValueError as error:
        expect(f"the {world.size} ranks have 0 together" in str(error), error)


def wrong_shape(world):
    import shoal.torch
    for wrong in (torch.ones(3), torch.ones(3, CHANNELS + 1)):
        try:
            shoal.torch.SyncBatchNorm(CHANNELS)(wrong)
            raise AssertionError("a tensor of a wrong shape was normalized")
        except ValueError as error:
            expect(f"not {tuple(wrong.shape)}" in str(error), error)
    try:
        shoal.torch.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())
        raise AssertionError("a lazy layer was converted")
    except ValueError as error:
        expect("run the model once" in str(error), error)


def conversion_keeps_what_is_there(world):
    import shoal.torch
    model = torch.nn.Sequential(torch.nn.Conv2d(3, CHANNELS, 3), torch.nn.BatchNorm2d(CHANNELS, affine=False),
                                torch.nn.Sequential(torch.nn.SyncBatchNorm(CHANNELS)))
    kept = dict(model.named_parameters())
    model.eval()
    model = shoal.torch.convert_sync_batchnorm(model)
    expect([type(part).__name__ for part in (model[1], model[2][0])] == ["SyncBatchNorm"] * 2, model)
    expect(all(parameter is kept[name] for name, parameter in model.named_parameters()))
    expect(not model[1].training and model[1].weight is None and model[1].running_mean.is_cpu)
    shoal.torch.DistributedDataParallel(model)  # torch's own layer would be refused
    expect(shoal.torch.SyncBatchNorm.convert_sync_batchnorm(model) is model)


def model_of(kind):
    return torch.nn.Sequential(torch.nn.Linear(3, CHANNELS), kind(CHANNELS), torch.nn.Linear(CHANNELS, 1))


def warned(world, model, count):
    """Returns the warnings of a DistributedDataParallel step with `count` samples."""
    import shoal.torch
    model = shoal.torch.DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(count, 3)).sum().backward()
    return [str(one.message) for one in caught if "batch norm" in str(one.message)]


def small_local_batches_are_told(world):
    import shoal.torch
    told = warned(world, model_of(torch.nn.BatchNorm1d), 4)
    expect(len(told) == (world.rank == 0), told)
    if told:
        expect("4 samples" in told[0] and '"1"' in told[0] and "convert_sync_batchnorm" in told[0], told)
    expect(not warned(world, model_of(torch.nn.BatchNorm1d), 16), "a batch that is large enough")
    expect(not warned(world, model_of(shoal.torch.SyncBatchNorm), 4), "a layer that is synchronized")
    expect(not warned(world, model_of(torch.nn.BatchNorm1d).eval(), 4), "a model that is not trained")


CASES = [exact_case(f"{name}, {kind.__name__}, {dtype}", kind, dtype, SHAPES[name])
         for name, kind, dtype in (("1d", even, torch.float64), ("1d in time", uneven, torch.float64), ("2d", uneven, torch.float32),
                                   ("2d", one_empty, torch.float64), ("3d", uneven, torch.float64), ("2d", uneven, torch.bfloat16))]
CASES += [exact_case("without weight", uneven, affine=False), exact_case("without statistics", uneven, track_running_stats=False),
          exact_case("cumulative average", uneven, momentum=None)]
CASES += [Case(body.__name__, body, sizes=(2,)) for body in (nothing_at_all, wrong_shape, conversion_keeps_what_is_there,
                                                            small_local_batches_are_told)]

if __name__ == "__main__":
    ranks.run(CASES)
