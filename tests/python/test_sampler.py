#!/usr/bin/env python3
"""shoal.torch.DistributedSampler and divide_batch: over real ranks and a DataLoader each sample once, resumed in mid-epoch, also by
another number of ranks. The order itself is tested in tests/unit/data/test_data.c."""
import ranks  # first: finds a python that has torch
import numpy
import torch
import torch.distributed as dist
import torch.utils.data as data
from ranks import Case, expect


def sampler_of(*arguments, **options):
    import shoal.torch
    return shoal.torch.DistributedSampler(*arguments, **options)


def message_of(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            expect(word in str(error), repr(word), "is not in", str(error))
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def gathered(world, samples):
    """Returns the samples of all ranks in turn, as long as all ranks have some."""
    every = [None] * world.size
    dist.all_gather_object(every, list(samples))
    return [sample for turn in zip(*every) for sample in turn], every


def each_sample_once(world):
    length = 101
    for shuffle in (True, False):
        for tail, drop_last in (("pad", False), ("drop", True), ("keep", False)):
            sampler = sampler_of(range(length), shuffle=shuffle, seed=3, drop_last=drop_last, tail=tail)
            expect(isinstance(sampler, data.DistributedSampler), "torch's class")
            order = list(sampler_of(length, 1, 0, shuffle=shuffle, seed=3))
            expect(sorted(order) == list(range(length)) and (order == list(range(length))) == (not shuffle), "the order")
            mine = list(sampler)
            expect(len(mine) == len(sampler) == sampler.num_samples, "the length")
            turns, every = gathered(world, mine)
            found = [sample for each in every for sample in each]
            whole = length // world.size * world.size
            if tail == "keep":
                expect(sorted(found) == list(range(length)), tail)
            elif tail == "drop":
                expect(turns == order[:whole] and len(found) == whole, tail)
            else:
                expect(turns == (order + order)[:len(found)] and len(found) == -(-length // world.size) * world.size, tail)


def numbers_of_other_types(world):
    """Whatever is a whole number is one: NumPy's, and a tensor of one."""
    for kind in (int, numpy.int64, numpy.uint8, torch.tensor):
        sampler = sampler_of(range(40) if kind is torch.tensor else kind(40), kind(2), kind(1), seed=kind(7))
        sampler.set_epoch(kind(3))
        sampler.load_state_dict({**sampler.state_dict(taken=kind(4)), "seed": kind(7)})
        expect(sampler.epoch == 3 and len(list(sampler)) == 16, kind)
        sampler.set_epoch(kind(3))
    expect(len(sampler_of(numpy.zeros((40, 2)), 2, 1)) == 20 and len(sampler_of(torch.zeros(40), 2, 1)) == 20, "a data set")
    for wrong in (1.0, numpy.float32(1), -1, "1", numpy.arange(2)):
        message_of(ValueError, lambda: sampler.set_epoch(wrong), "must be a whole number")  # noqa: B023


def epochs_differ(world):
    sampler = sampler_of(1000, seed=3)
    first = list(sampler)
    expect(list(sampler) == first, "the same epoch again")
    sampler.set_epoch(1)
    expect(list(sampler) != first, "another epoch")
    sampler.set_epoch(0)
    expect(list(sampler) == first, "the first epoch")
    expect(list(sampler_of(1000, seed=4)) != first, "another seed")


def resumes(world):
    """With a loader whose workers load ahead, the state counts only the samples that were trained on."""
    numbers = torch.arange(240)
    sampler = sampler_of(numbers, seed=5)
    sampler.set_epoch(2)
    seen = []
    for step, batch in enumerate(data.DataLoader(numbers, batch_size=4, sampler=sampler, num_workers=world.rank % 2)):
        seen += batch.tolist()
        if step == 6:
            break
    state = sampler.state_dict(taken=28)
    expect(state == {"epoch": 2, "seed": 5, "samples": 240, "used": 28 * world.size}, state)
    other = sampler_of(numbers, seed=99)
    other.load_state_dict(state)
    other.set_epoch(2)  # as a loop over epochs does
    expect(len(other) == (240 - state["used"]) // world.size, len(other))
    rest = list(other)
    turns, _ = gathered(world, seen + rest)
    order = sampler_of(240, 1, 0, seed=5)
    order.set_epoch(2)
    expect(turns == list(order), "the order that it would have been")
    expect(len(list(other)) == 240 // world.size, "the next pass is a whole one")
    another = [sampler_of(240, 5, rank, seed=0, tail="keep") for rank in range(5)]  # five ranks continue
    for each in another:
        each.load_state_dict(state)
    rests = [sample for each in another for sample in each]
    expect(sorted(rests + gathered(world, seen)[0]) == list(range(240)), "other ranks take the rest")
    message_of(ValueError, lambda: sampler_of(241).load_state_dict(state), "240 samples, this one has 241")


def huge(world):
    sampler = sampler_of(2**33, seed=1)
    iterator = iter(sampler)
    mine = [next(iterator) for _ in range(100)]
    turns, _ = gathered(world, mine)
    expect(len(set(turns)) == 100 * world.size and max(turns) > 2**32 and len(sampler) == -(-2**33 // world.size), "huge")


def batches(world):
    import shoal.torch
    per_rank, all_ranks, left = shoal.torch.divide_batch(100)
    expect(per_rank == 100 // world.size and all_ranks == per_rank * world.size and left == 100 % world.size, "divided")
    expect(shoal.torch.divide_batch(1000, ranks=32) == (31, 992, 8), "32 ranks")
    message_of(ValueError, lambda: shoal.torch.divide_batch(3, ranks=4), "a global batch of 3 leaves nothing")


def wrong_arguments(world):
    message_of(ValueError, lambda: sampler_of(10, 3, 3), "rank 3 is out of range: there are 3 ranks")
    message_of(ValueError, lambda: sampler_of(10, tail="cut"), "cut", "pad, drop, keep")
    message_of(ValueError, lambda: sampler_of(10, seed=-1), "seed is -1")
    message_of(ValueError, lambda: sampler_of(2**63), "samples are more than")
    message_of(ValueError, lambda: sampler_of(10).set_epoch(0.5), "epoch is 0.5")


def without_a_group(world):
    message_of(RuntimeError, lambda: sampler_of(10), "must be given")
    expect(sorted(sampler_of(10, 1, 0)) == list(range(10)), "given")


CASES = [Case(body.__name__, body, sizes=(1, 2, 3)) for body in (each_sample_once, resumes)]
CASES += [Case(body.__name__, body, sizes=(2,)) for body in (epochs_differ, numbers_of_other_types, huge, batches, wrong_arguments)]
CASES += [Case("without_a_group", without_a_group, sizes=(1,), init=False, fresh=True)]

if __name__ == "__main__":
    ranks.run(CASES)
