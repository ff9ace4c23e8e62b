#!/usr/bin/env python3
"""TensorFlow and PyTorch in one process, each over Shoal: in either order, at the same time, after one has ended, and after
a rank has died."""
import contextlib
import os
import sys

import tensorflow as tf

import forked
from tap import Skip, expect, run_cases

# After TensorFlow's own packages, so that numpy is TensorFlow's.
sys.path += [str(folder) for folder in forked.TOP.glob("build/torch/lib/python3*/site-packages")]
with contextlib.suppress(ModuleNotFoundError):
    import torch
    import torch.distributed as dist

    import shoal.torch  # noqa: F401
import shoal.tensorflow  # noqa: E402


def begin_tensorflow():
    shoal.tensorflow.init()


def begin_torch():
    dist.init_process_group("shoal")


def both_work():
    for length in (10, 100_000):
        of_torch = torch.ones(length)
        work = dist.all_reduce(of_torch, async_op=True)
        of_tensorflow = shoal.tensorflow.allreduce(tf.ones([length]), op=shoal.tensorflow.ReduceOp.SUM)
        work.wait()
        expect(of_torch[-1].item() == 2 and float(of_tensorflow[-1]) == 2, of_torch, of_tensorflow)


def begun(*order):
    def body(rank):
        for begin in order:
            begin()
        both_work()
        expect(shoal.tensorflow.rank() == dist.get_rank() == rank and shoal.tensorflow.size() == dist.get_world_size())
        shoal.tensorflow.shutdown()
        of_torch = torch.ones(10)
        dist.all_reduce(of_torch)  # PyTorch has its own context
        expect(of_torch[0].item() == 2, of_torch)
        dist.destroy_process_group()
    return body


def begun_twice(rank):
    """Each framework raises its usual error, and both continue to work."""
    begin_tensorflow()
    begin_torch()
    for begin, kind, words in ((begin_tensorflow, RuntimeError, "already initialized"), (begin_torch, ValueError, "twice")):
        try:
            begin()
            raise AssertionError("it began twice")
        except kind as error:
            expect(words in str(error), error)
    both_work()


def fails_in_one(rank):
    """A mismatch between ranks in TensorFlow leaves PyTorch's groups intact."""
    begin_tensorflow()
    begin_torch()
    try:
        shoal.tensorflow.allreduce(tf.ones([3 + rank]), op=shoal.tensorflow.ReduceOp.SUM)
        raise AssertionError("ragged shapes were reduced")
    except tf.errors.OpError as error:
        expect("rank" in str(error), error)
    of_torch = torch.ones(10)
    dist.all_reduce(of_torch)
    expect(of_torch[0].item() == 2, of_torch)


def dies(rank):
    """Each framework raises its own class of error."""
    begin_tensorflow()
    begin_torch()
    both_work()
    if rank == 1:
        os._exit(9)
    for call, kind in ((lambda: shoal.tensorflow.allreduce(tf.ones([10])), tf.errors.AbortedError),
                       (lambda: dist.all_reduce(torch.ones(10)), dist.DistBackendError)):
        try:
            call()
            raise AssertionError("an all-reduce without rank 1")
        except kind as error:
            expect("rank 1" in str(error), error)


def case_of(name, body, codes=(0, 0)):
    def case():
        if "torch" not in sys.modules:
            raise Skip("there is no build/torch: `make test-all` makes it")
        ranks = forked.Ranks(2, body)
        expect(ranks.codes == list(codes), ranks.told())
    case.__name__ = name
    return case


CASES = [case_of("tensorflow_before_torch", begun(begin_tensorflow, begin_torch)),
         case_of("torch_before_tensorflow", begun(begin_torch, begin_tensorflow)),
         case_of("each_tells_that_it_was_begun_twice", begun_twice),
         case_of("a_failure_in_one_leaves_the_other", fails_in_one),
         case_of("a_rank_that_dies_fails_both", dies, codes=(0, 9))]

if __name__ == "__main__":
    run_cases(CASES)
