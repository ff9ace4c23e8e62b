#!/usr/bin/env python3
"""The examples, run as a user runs them: the ladder with 1 to 3 workers, and the main job fashion_mnist with 1, 2 and 4.

Prints TAP. SHOAL_COMMAND is the `shoal` command, SHOAL_EXAMPLES the folder of the built examples, SHOAL_DATA (optional) the
folder of Fashion-MNIST. A case fails by an AssertionError; Skip skips it with a reason.
"""
import csv
import functools
import gzip
import os
import re
import struct
import subprocess
import sys
import tempfile

from images import write_part

COMMAND = os.environ.get("SHOAL_COMMAND", "shoal")
EXAMPLES = os.environ.get("SHOAL_EXAMPLES", ".")
DATA = os.environ.get("SHOAL_DATA", "/usr/share/datasets/fashion-mnist")
FASHION = os.path.join(EXAMPLES, "fashion_mnist")
SECONDS_MAX = 120
TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../..")
LEAKS = os.path.join(TOP, "tests/multi/libfabric.supp")


class Skip(Exception):
    pass


def run(workers, *program):
    """Runs a program through `shoal run`; returns its exit code, stdout and stderr."""
    done = subprocess.run([COMMAND, "run", "-n", str(workers), *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=SECONDS_MAX)
    return done.returncode, done.stdout, done.stderr


def run_alone(*program):
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)
    return done.returncode, done.stdout, done.stderr


def expect_lines(workers, program, expected):
    code, out, err = run(workers, os.path.join(EXAMPLES, program))
    assert code == 0, f"{program} with {workers} workers ended with {code}: {out}{err}"
    for line in expected:
        assert out.count(line) == 1, f"{program} with {workers} workers: not once '{line}' in:\n{out}{err}"


# ---- the ladder ----


def hello_sums_the_ranks():
    for workers in (1, 2, 3):
        total = workers * (workers - 1) // 2
        expect_lines(workers, "01_hello",
                     [f"rank {rank} of {workers}: the sum of all ranks is {total}" for rank in range(workers)])


def async_sums_every_buffer():
    for workers in (1, 2, 3):
        expect_lines(workers, "02_async",
                     [f"rank {rank} of {workers}: 4 all-reduces of 262144 floats, 0 wrong elements" for rank in range(workers)])


def groups_split_and_pass_round():
    for workers in (1, 2, 3):
        expected = []
        for rank in range(workers):
            group = list(range(rank % 2, workers, 2))
            expected.append(f"rank {rank}: member {group.index(rank)} of {len(group)} in the {'odd' if rank % 2 else 'even'} "
                            f"group, whose ranks sum to {sum(group)}")
            expected.append(f"rank {rank}: received {(rank - 1) % workers} from the left" if workers > 1 else
                            "rank 0: alone, so nobody to send to")
        expect_lines(workers, "03_groups", expected)


def sharded_ends_at_the_average_of_all_targets():
    for workers in (1, 2, 3):
        expected = [f"rank {rank} of {workers} keeps {1003 // workers + (rank < 1003 % workers)} of 1003 parameters; after 60 steps "
                    "the worst is 0.000" for rank in range(workers)]
        expect_lines(workers, "04_sharded", expected)


def gradients_end_at_the_average_of_all_targets():
    for workers in (1, 2, 3):
        expect_lines(workers, "05_gradients",
                     [f"rank {rank} of {workers}: off by 0.003 after 20 steps" for rank in range(workers)])


def shards_fit_where_the_whole_model_does_not():
    """The limit is for ranks that claim to be on hosts of their own, which do not map each other's memory."""
    program, losses = os.path.join(EXAMPLES, "06_shards"), []
    for options in ((), ("--whole",), ("--limit", "96")):
        code, out, err = run_on_hosts(4, 1, program, *options)
        assert code == 0, out + err
        found = re.findall(r"rank (\d) of 4: loss ([\d.]+) after 30 steps, with (\d+) MiB for a model of 128 MiB", out)
        assert len(found) == 4 and all(int(mib) == (128 if "--whole" in options else 37) for *_, mib in found), out
        losses.append(sorted(row[:2] for row in found))
    assert losses[0] == losses[1] == losses[2], losses
    code, out, err = run_on_hosts(4, 1, program, "--whole", "--limit", "96")
    assert code == 1 and "no memory for 67108864 bytes of shards and live units" in out + err, out + err


def a_pipeline_learns_what_one_rank_learns():
    program = os.path.join(EXAMPLES, "07_pipeline")
    for workers, words in ((1, ()), (2, ("zb-h1",)), (3, ()), (3, ("v-zb",)), (4, ("interleaved",))):
        code, out, err = run(workers, program, *words)
        assert code == 0, out + err
        name = words[0] if words else "1f1b"
        found = re.findall(rf"rank (\d) of {workers}, {name}: loss 0\.013838, alone 0\.013838; the last step took \d+ us", out)
        assert sorted(map(int, found)) == list(range(workers)), out
    code, out, err = run_alone(program, "1f2b")
    assert code == 2 and "1f2b is not a schedule" in err, err


# ---- fashion_mnist: training ----


def need_fashion():
    if not os.access(FASHION, os.X_OK):
        raise Skip(f"{FASHION} is not built: apt install libopenblas-dev zlib1g-dev")


def need_dataset():
    need_fashion()
    if not any(os.path.exists(os.path.join(DATA, "train-images-idx3-ubyte" + ending)) for ending in ("", ".gz")):
        raise Skip(f"no Fashion-MNIST in {DATA}: apt install dataset-fashion-mnist")


@functools.cache
def part():
    """Returns a temporary folder with 12,000 images for training and all test images. It is removed when the program ends."""
    folder = tempfile.TemporaryDirectory(prefix="shoal-images-")
    write_part(DATA, folder.name, train=12000, t10k=10000)
    return folder


def train(workers, folder, name, *options):
    """Trains briefly. Returns the losses as {step: loss} and the output."""
    path = os.path.join(folder, name + ".csv")
    code, out, err = run(workers, FASHION, "--data", part().name, "--limit", "6000", "--hidden", "128", "--loss-csv", path, *options)
    assert code == 0, f"{name} ended with {code}: {out}{err}"
    assert f"identical bits on {workers} of {workers} workers" in out, f"{name}: no line about identical bits in:\n{out}"
    with open(path, newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}, out


def expect_same_curve(curve, expected, name, relative=1e-3, absolute=1e-5):
    assert curve.keys() == expected.keys(), f"{name}: steps {sorted(curve)} instead of {sorted(expected)}"
    for step, loss in expected.items():
        assert abs(curve[step] - loss) <= absolute + relative * abs(loss), f"{name}: step {step} {curve[step]} instead of {loss}"


def expect_same_for_all_sizes(folder, batch, steps):
    alone, out = train(1, folder, "alone", "--epochs", "1", "--batch", batch)
    assert sorted(alone) == list(range(1, steps + 1)), f"{len(alone)} steps instead of {steps}"
    assert 1.8 < alone[1] < 4 and alone[steps] < 0.6 * alone[1], f"it learns nothing: {alone[1]} to {alone[steps]}"
    for workers in (2, 4):
        curve, _ = train(workers, folder, f"of{workers}", "--epochs", "1", "--batch", batch)
        expect_same_curve(curve, alone, f"{workers} workers, batch {batch}")


def loss_curves_agree(folder):
    expect_same_for_all_sizes(folder, "256", 24)


def loss_curves_agree_when_the_batch_does_not_divide(folder):
    expect_same_for_all_sizes(folder, "101", 60)


def batch_smaller_than_the_workers_is_right(folder):
    options = ("--epochs", "1", "--limit", "60", "--batch", "3", "--lr", "0.01", "--data", DATA)  # all images, packed
    alone, _ = train(1, folder, "alone", *options)
    curve, _ = train(4, folder, "of4", *options)
    expect_same_curve(curve, alone, "4 workers, batch 3")


def costs_of(out):
    """Returns the costs of a step of worker 0: milliseconds in all, in computing during sums and in waiting for sums; MB
    sent to other hosts."""
    line = re.search("a step of worker 0: .*", out)
    assert line, f"no line about a step in:\n{out}"
    return [float(number) for number in re.findall(r"(\d+\.\d+) (?:ms|MB)", line.group())]


def overlap_changes_nothing(folder):
    """Overlap changes only when sums begin. These layers fill two buffers, so one can be summed while the other is computed."""
    layers = ("--epochs", "1", "--hidden", "512,256")
    overlapped, out = train(2, folder, "on", *layers, "--overlap", "on")
    step, beside, _, sent = costs_of(out)
    assert 0 < beside < step and sent == 0, out
    for options in (("--no-overlap",), ("--overlap", "off")):
        summed_after, out = train(2, folder, "off", *layers, *options)
        expect_same_curve(overlapped, summed_after, "--overlap on")
        step, beside, waiting, _ = costs_of(out)
        assert beside == 0 < waiting < step, out


def ranks_that_are_left_continue():
    """Each rank adds the sum of its number + 1 over the ranks that are there: five steps with all, five with those left."""
    program = os.path.join(EXAMPLES, "08_shrink")
    for workers, per_host, lost in ((4, 4, (0,)), (4, 4, (1, 3)), (3, 3, (0, 1)), (4, 2, (0,)), (4, 2, (2, 3))):
        left = [rank for rank in range(workers) if rank not in lost]
        code, out, err = run_on_hosts(workers, per_host, "--keep-going", program, *map(str, lost))
        x = 5 * sum(range(1, workers + 1)) + 5 * sum(rank + 1 for rank in left)
        assert code == 0 and out.count(f"10 steps, x = {x}") == len(left), (workers, per_host, lost, code, out, err)
    code, out, err = run_on_hosts(3, 3, "--keep-going", program, "0", "1", "2")
    assert code == 137 and "10 steps" not in out, (code, out, err)


def run_on_hosts(workers, per_host, *program):
    """Like run(), but the workers claim to be on several hosts with per_host workers each. Options of the command come first."""
    leaks = f"LSAN_OPTIONS=suppressions={LEAKS}:print_suppressions=0"
    options = [word for word in program if word == "--keep-going"]
    program = program[len(options):]
    return run(workers, *options, "sh", "-c", f'SHOAL_HOST_ID=h$((RANK / {per_host})) exec "$@"', "sh", "env", leaks, *program)


def accuracy_of(out):
    return float(out.split("test accuracy ")[1].split()[0])


def compression_costs_no_accuracy():
    """Compressed gradients between two hosts of two workers: accuracy within half a point, fewer bytes, and the same bits
    on all workers."""
    accuracies, sent = {}, {}
    for compression in ("none", "float16", "bfloat16", "int8"):
        code, out, err = run_on_hosts(4, 2, FASHION, "--data", part().name, "--epochs", "3", "--limit", "12000", "--hidden", "128", "--compress",
                                     compression)
        if "no network" in err or "libfabric" in err and code:
            raise Skip("no network joins several hosts here")
        assert code == 0 and "identical bits on 4 of 4 workers" in out, f"{compression}: {out}{err}"
        accuracies[compression], sent[compression] = accuracy_of(out), costs_of(out)[-1]
    assert accuracies["none"] > 75, accuracies
    for compression, accuracy in accuracies.items():
        assert abs(accuracy - accuracies["none"]) <= 0.5, accuracies
    for compression, at_most in (("float16", 0.55), ("bfloat16", 0.55), ("int8", 0.3)):
        assert 0 < sent[compression] < at_most * sent["none"], sent


def hash_of(out):
    return out.split("hash ")[1].split()[0]


def a_run_repeats_to_the_bit(folder):
    first, first_out = train(2, folder, "first", "--epochs", "1")
    second, second_out = train(2, folder, "second", "--epochs", "1")
    assert first == second, "two runs alike gave two curves"
    assert hash_of(first_out) == hash_of(second_out), "two runs alike gave two sets of parameters"


def resume_goes_on_as_if_never_stopped(folder):
    checkpoint = os.path.join(folder, "state")
    whole, whole_out = train(2, folder, "whole", "--epochs", "3")
    begun, _ = train(2, folder, "begun", "--epochs", "1", "--checkpoint", checkpoint)
    assert not os.path.exists(checkpoint + ".tmp"), "the temporary file was left behind"
    resumed, resumed_out = train(2, folder, "resumed", "--epochs", "3", "--resume", checkpoint, "--checkpoint", checkpoint)
    assert f"going on from {checkpoint}, after epoch 1" in resumed_out, resumed_out
    assert {**begun, **resumed} == whole, "the resumed curve differs"
    assert hash_of(resumed_out) == hash_of(whole_out), "the resumed run ended with other parameters"
    finished, finished_out = train(2, folder, "finished", "--epochs", "3", "--resume", checkpoint)
    assert not finished and hash_of(finished_out) == hash_of(whole_out), "a finished run trained on"


WAYS = ((), ("--optimizer", "reduction"), ("--shard",))


def every_way_to_step_trains_the_same_network(folder):
    """The batch does not divide by the workers, and neither do the layers."""
    options = ("--epochs", "2", "--batch", "101", "--hidden", "128,33")
    for workers in (1, 2, 3):
        expected, expected_out = train(workers, folder, "all", *options)
        for way in WAYS[1:]:
            curve, out = train(workers, folder, "way", *options, *way)
            expect_same_curve(curve, expected, f"{workers} workers, {way}")
            assert abs(accuracy_of(out) - accuracy_of(expected_out)) <= 0.2, f"{way}: {out}{expected_out}"
    costs_of(train(2, folder, "reduction", *options, "--optimizer", "reduction", "--overlap", "off")[1])


def a_checkpoint_of_one_way_continues_in_another(folder):
    """Velocities are collected from the owners of their shards, and divided again among other numbers of workers."""
    whole, _ = train(2, folder, "whole", "--epochs", "4")
    parts = []
    for epochs, way, workers in ((1, WAYS[2], 3), (2, WAYS[1], 2), (3, WAYS[0], 1), (4, WAYS[2], 2)):
        checkpoint = os.path.join(folder, f"state{epochs}")
        resume = ("--resume", os.path.join(folder, f"state{epochs - 1}")) if parts else ()
        parts.append(train(workers, folder, "part", "--epochs", str(epochs), "--checkpoint", checkpoint, *resume, *way)[0])
    expect_same_curve({step: loss for part in parts for step, loss in part.items()}, whole, "resumed in other ways")


def layers_are_gathered_between_hosts():
    code, out, err = run_on_hosts(4, 2, FASHION, "--data", part().name, "--epochs", "2", "--limit", "3000", "--hidden", "64", "--shard")
    if "no network" in err or "libfabric" in err and code:
        raise Skip("no network joins several hosts here")
    assert code == 0 and "identical bits on 4 of 4 workers" in out and accuracy_of(out) > 65, out + err


# ---- fashion_mnist: faults ----


def write_gz(path, content):
    with gzip.open(path, "wb") as file:
        file.write(content)


def idx_images(count, magic=0x803):
    return struct.pack(">IIII", magic, count, 28, 28) + bytes(i % 251 for i in range(784 * count))


def idx_labels(count, magic=0x801):
    return struct.pack(">II", magic, count) + bytes(i % 10 for i in range(count))


def make_dataset(folder):
    """Writes 40 training and 20 test images without meaning."""
    os.makedirs(folder)
    for kind, count in (("train", 40), ("t10k", 20)):
        write_gz(os.path.join(folder, f"{kind}-images-idx3-ubyte.gz"), idx_images(count))
        write_gz(os.path.join(folder, f"{kind}-labels-idx1-ubyte.gz"), idx_labels(count))
    return folder


def expect_fault(code, workers, options, *words):
    """Expects an exit code, and a line on stderr with these words. 0 workers means without a launcher; then no other line
    may follow, because no launcher repeats it."""
    program = (FASHION, *options)
    got, out, err = run_alone(*program) if workers == 0 else run(workers, *program)
    assert got == code, f"{options}: exit code {got} instead of {code}: {out}{err}"
    lines = [line for line in err.splitlines() if "fashion_mnist: " in line]
    if workers == 0:
        assert len(lines) == 1, f"{options}: not one line but:\n{err}"
    fitting = [line for line in lines if all(word in line for word in words)]
    assert fitting, f"{options}: no line with {words} in:\n{err}"


def synthetic_data_is_accepted(folder):
    data = make_dataset(os.path.join(folder, "data"))
    code, out, err = run_alone(FASHION, "--data", data, "--epochs", "1", "--batch", "10")
    assert code == 0 and "40 training and 20 test images, 1 worker" in out, out + err


def plain_files_are_accepted(folder):
    data = make_dataset(os.path.join(folder, "data"))
    for name in os.listdir(data):
        with gzip.open(os.path.join(data, name)) as packed, open(os.path.join(data, name[:-3]), "wb") as plain:
            plain.write(packed.read())
        os.unlink(os.path.join(data, name))
    code, out, err = run_alone(FASHION, "--data", data, "--epochs", "1", "--batch", "10")
    assert code == 0, out + err


def bad_options_are_named():
    for options, words in ((("--bogus",), ("'--bogus'", "--help")),
                           (("-x",), ("'-x'", "--help")),
                           (("--epochs",), ("--epochs", "value")),
                           (("--epochs", "0"), ("--epochs", "from 1", "'0'")),
                           (("--batch", "12x"), ("--batch", "'12x'")),
                           (("--lr", "-1"), ("--lr", "'-1'")),
                           (("--lr", "nan"), ("--lr", "'nan'")),
                           (("--hidden", "12,,3"), ("--hidden", "'12,,3'")),
                           (("--hidden", "1,2,3,4,5,6,7"), ("--hidden", "1 to 6")),
                           (("--seed", "99999999999999999999"), ("--seed",)),
                           (("--overlap", "maybe"), ("--overlap", "on or off")),
                           (("--no-overlap=off",), ("--no-overlap",)),
                           (("--compress", "zip"), ("--compress", "none, float16, bfloat16 or int8", "'zip'")),
                           (("--optimizer", "adam"), ("--optimizer", "workers or reduction", "'adam'")),
                           (("--shard", "--compress", "int8"), ("--compress", "--shard")),
                           (("--optimizer", "reduction", "--compress", "int8"), ("--compress", "--optimizer reduction")),
                           (("--shard", "--no-overlap"), ("--shard", "--overlap off")),
                           (("--shard", "--optimizer", "reduction"), ("--shard", "leave one out")),
                           (("train",), ("'train'", "--help"))):
        expect_fault(2, 0, options, *words)
    expect_fault(2, 2, ("--bogus",), "'--bogus'")


def missing_data_says_what_to_do(folder):
    advice = "apt install dataset-fashion-mnist"
    absent = os.path.join(folder, "absent")
    for workers in (0, 2):
        expect_fault(1, workers, ("--data", absent), absent, "No such file", advice, "--data DIR")
    data = make_dataset(os.path.join(folder, "data"))
    os.unlink(os.path.join(data, "t10k-labels-idx1-ubyte.gz"))
    expect_fault(1, 0, ("--data", data), "t10k-labels-idx1-ubyte.gz", "No such file", advice)


def damaged_data_is_named(folder):
    def cut(path):
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) * 2 // 3)

    def garble(path):
        with open(path, "r+b") as file:
            file.seek(-8, os.SEEK_END)  # the checksum
            file.write(b"\0\0\0\0")

    images = "train-images-idx3-ubyte.gz"
    labels = "train-labels-idx1-ubyte.gz"
    cases = (("cut", images, cut, "truncated"),
             ("checksum", labels, garble, "damaged"),
             ("empty", images, lambda path: open(path, "wb").close(), "truncated"),
             ("short", images, lambda path: write_gz(path, idx_images(40)[:-100]), "ends 100 bytes early"),
             ("long", images, lambda path: write_gz(path, idx_images(40) + b"x"), "longer than its header"),
             ("magic", images, lambda path: write_gz(path, idx_images(40, 0x801)), "0x00000801, not 0x00000803"),
             ("size", images, lambda path: write_gz(path, struct.pack(">IIII", 0x803, 40, 32, 32)), "32 x 32"),
             ("many", images, lambda path: write_gz(path, struct.pack(">IIII", 0x803, 2**32 - 1, 28, 28)), "4294967295"),
             ("label", labels, lambda path: write_gz(path, idx_labels(40)[:-1] + b"\x0a"), "is 10, not 0 to 9"),
             ("counts", labels, lambda path: write_gz(path, idx_labels(39)), "40 images"))
    for name, file, damage, word in cases:
        data = make_dataset(os.path.join(folder, name))
        damage(os.path.join(data, file))
        expect_fault(1, 0, ("--data", data), file[:-3], word, "apt install")


def one_worker_without_data_stops_all(folder):
    make_dataset(os.path.join(folder, "data0"))
    script = f"exec {FASHION} --epochs 1 --batch 10 --data {folder}/data$RANK"
    code, out, err = run(2, "sh", "-c", script)
    assert code == 1, f"exit code {code}: {out}{err}"
    assert f"{folder}/data1" in err and "epoch" not in out, out + err


def workers_with_different_options_stop(folder):
    data = make_dataset(os.path.join(folder, "data"))
    code, out, err = run(2, "sh", "-c", f"exec {FASHION} --epochs 1 --batch 1$RANK --data {data}")
    assert code == 1 and "different options or data" in err, out + err


def files_that_cannot_be_used_are_named(folder):
    data = make_dataset(os.path.join(folder, "data"))
    small = ("--data", data, "--epochs", "1", "--batch", "10", "--hidden", "8")
    nowhere = os.path.join(folder, "nowhere", "file")
    for workers in (0, 2):
        expect_fault(1, workers, (*small, "--loss-csv", nowhere), nowhere, "--loss-csv")
        expect_fault(1, workers, (*small, "--checkpoint", nowhere), nowhere, "--checkpoint")
        expect_fault(1, workers, (*small, "--resume", nowhere), nowhere, "No such file")

    state = os.path.join(folder, "state")
    code, out, err = run_alone(FASHION, *small, "--checkpoint", state)
    assert code == 0, out + err
    expect_fault(1, 0, (*small, "--hidden", "9", "--resume", state), state, "--hidden")
    expect_fault(1, 0, (*small, "--seed", "2", "--resume", state), state, "--seed 1", "--seed 2")
    expect_fault(1, 0, (*small, "--resume", FASHION), "no checkpoint")
    with open(state, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    expect_fault(1, 0, (*small, "--resume", state), state, "damaged")
    os.truncate(state, os.path.getsize(state) - 4)
    expect_fault(1, 0, (*small, "--resume", state), state, "truncated")


def diverging_loss_stops_all(folder):
    data = make_dataset(os.path.join(folder, "data"))
    expect_fault(1, 2, ("--data", data, "--epochs", "50", "--batch", "10", "--lr", "1e30"), "the loss of step", "--lr")


def help_lists_the_options():
    need_fashion()
    code, out, err = run_alone(FASHION, "--help")
    assert code == 0 and not err, err
    for option in ("data", "epochs", "batch", "lr", "seed", "hidden", "limit", "loss-csv", "checkpoint", "resume", "overlap",
                   "no-overlap", "compress"):
        assert "  --" + option in out, option


# Each case with what it needs: nothing, the program, or the program and the real images.
CASES = (
    (hello_sums_the_ranks, None),
    (async_sums_every_buffer, None),
    (groups_split_and_pass_round, None),
    (sharded_ends_at_the_average_of_all_targets, None),
    (gradients_end_at_the_average_of_all_targets, None),
    (shards_fit_where_the_whole_model_does_not, None),
    (a_pipeline_learns_what_one_rank_learns, None),
    (ranks_that_are_left_continue, None),
    (help_lists_the_options, need_fashion),
    (loss_curves_agree, need_dataset),
    (loss_curves_agree_when_the_batch_does_not_divide, need_dataset),
    (batch_smaller_than_the_workers_is_right, need_dataset),
    (overlap_changes_nothing, need_dataset),
    (compression_costs_no_accuracy, need_dataset),
    (a_run_repeats_to_the_bit, need_dataset),
    (resume_goes_on_as_if_never_stopped, need_dataset),
    (every_way_to_step_trains_the_same_network, need_dataset),
    (a_checkpoint_of_one_way_continues_in_another, need_dataset),
    (layers_are_gathered_between_hosts, need_dataset),
    (synthetic_data_is_accepted, need_fashion),
    (plain_files_are_accepted, need_fashion),
    (bad_options_are_named, need_fashion),
    (missing_data_says_what_to_do, need_fashion),
    (damaged_data_is_named, need_fashion),
    (one_worker_without_data_stops_all, need_fashion),
    (workers_with_different_options_stop, need_fashion),
    (files_that_cannot_be_used_are_named, need_fashion),
    (diverging_loss_stops_all, need_fashion),
)


def run_case(case, need):
    if need:
        need()
    if case.__code__.co_argcount == 0:
        return case()
    with tempfile.TemporaryDirectory(prefix="shoal-test-") as folder:
        return case(folder)


def main():
    failed = 0
    print(f"1..{len(CASES)}")
    for number, (case, need) in enumerate(CASES, 1):
        name = "fashion_mnist_" + case.__name__ if need else "examples_" + case.__name__
        try:
            run_case(case, need)
            print(f"ok {number} - {name}")
        except Skip as reason:
            print(f"ok {number} - {name} # SKIP {reason}")
        except (AssertionError, OSError, subprocess.TimeoutExpired) as reason:
            failed += 1
            print(f"not ok {number} - {name}")
            for line in str(reason).splitlines():
                print("#   " + line)
        sys.stdout.flush()
    return failed != 0


def tell_openblas():
    """Sets OPENBLAS_CORETYPE as the demo does; otherwise training takes twice the time."""
    told = subprocess.run([f"{TOP}/dev/openblas.sh", "printenv", "OPENBLAS_CORETYPE"], stdout=subprocess.PIPE, text=True).stdout.split()
    if told:
        os.environ["OPENBLAS_CORETYPE"] = told[-1]


if __name__ == "__main__":
    tell_openblas()
    sys.exit(main())
