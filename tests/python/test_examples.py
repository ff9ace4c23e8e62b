#!/usr/bin/env python3
"""The examples for PyTorch, shortened, as a user runs them: what they learn under each launcher, and what they refuse.

SHOAL_DATA (optional) is the folder of Fashion-MNIST, SHOAL_TEXT the file of the text.
"""
import functools
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile

import ranks  # first: finds a Python with torch, and sets the path to shoal for children  # noqa: F401
import torch  # noqa: F401
import torch._dynamo  # noqa: F401: else each worker's first optimizer imports it, in two seconds
import torch.distributed.checkpoint.state_dict  # noqa: F401: so do the optimizers of the GPT
import torch.distributed.fsdp  # noqa: F401
import warm
from images import write_part
from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
FASHION, GPT, OUTER = (TOP / "examples/torch" / name for name in ("fashion_mnist", "gpt", "outer_steps"))
SHOAL = pathlib.Path(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
IMAGES = pathlib.Path(os.environ.get("SHOAL_DATA", "/usr/share/datasets/fashion-mnist"))
TEXT = pathlib.Path(os.environ.get("SHOAL_TEXT", "/usr/lib/bible.data"))
PYTHON = warm.start()
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone"]
SECONDS_MAX = 300  # importing torch alone takes long when other tests run

GPT_SHORT = ["--layers", "2", "--width", "128", "--context", "64", "--save-every", "20", "--sample", "40"]


def needs(*paths):
    for path in paths:
        if not path.exists():
            raise Skip(f"no {path} here")


@functools.cache
def part():
    """Returns a temporary folder with 6,000 training and 4,000 test images. It is removed when the program ends."""
    folder = tempfile.TemporaryDirectory(prefix="shoal-images-")
    write_part(IMAGES, folder.name, train=6000, t10k=4000)
    return folder


def fashion_short():
    needs(IMAGES)
    return ["--data", part().name, "--epochs", "1"]


@functools.cache
def plain():
    """Returns the text as an unpacked file. Unpacking would take each worker hundreds of processes."""
    file = tempfile.NamedTemporaryFile(prefix="shoal-text-")
    unpack = "import pathlib, sys, train; train.read_text(pathlib.Path(sys.argv[1])).numpy().tofile(sys.argv[2])"
    code, out, err = call(PYTHON, "-c", unpack, TEXT, file.name,
                          env={**os.environ, "PYTHONPATH": f"{GPT}:{os.environ['PYTHONPATH']}"})
    expect(code == 0, out, err)
    return file


def gpt_short():
    needs(TEXT)
    return ["--data", plain().name, *GPT_SHORT]


def run(example, *words, workers, env=None):
    return call(SHOAL, "run", "-n", workers, PYTHON, example / "train.py", *words, timeout=SECONDS_MAX, env=env)


def train(example, *words, workers=2, env=None):
    """Runs an example through `shoal run`; returns rank 0's output."""
    code, out, err = run(example, *words, workers=workers, env=env)
    expect(code == 0, f"exit code {code}", out, err)
    return re.sub(r"^0\| ", "", out, flags=re.M)


def last_number(word, text):
    found = re.findall(rf"{word} ([0-9.]+)", text)
    expect(found, f"no {word} in", text)
    return float(found[-1])


def refused(example, *words, about, workers=1):
    code, out, err = run(example, *words, workers=workers)
    expect(code != 0 and any("train.py: " in line and about in line for line in err.splitlines()), code, out, err)
    expect("Traceback" not in err, err)


def fashion_mnist_learns_the_same_with_one_and_two_workers():
    told = [train(FASHION, *fashion_short(), workers=workers) for workers in (1, 2)]
    accuracies = [last_number("test accuracy", text) for text in told]
    losses = [last_number("loss", text) for text in told]
    expect(min(accuracies) > 65 and max(accuracies) - min(accuracies) < 2, *told)
    expect(max(losses) - min(losses) < 0.02, *told)


def fashion_mnist_prints_lines_or_a_bar():
    needs(IMAGES)
    short = ["--data", IMAGES, "--limit", "2400", "--epochs", "1"]
    lines = train(FASHION, *short)
    expect(re.search(r"^epoch 1/1  loss \d\.\d{4}  test accuracy \d+\.\d\d %  \d+\.\d s$", lines, re.M), lines)
    expect("\r" not in lines, repr(lines))
    bar = train(FASHION, *fashion_short(), "--limit", "2400", env={**os.environ, "SHOAL_RUN_TERMINAL": "1"})
    expect(re.search(r"epoch 1/1 \[#*-*\] +\d+ %", bar) and "\033[K" in bar, repr(bar))


def fashion_mnist_says_what_it_lacks():
    with tempfile.TemporaryDirectory() as folder:
        refused(FASHION, "--data", folder, about="run `apt install dataset-fashion-mnist` or pass --data DIR")
        (pathlib.Path(folder) / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
        refused(FASHION, "--data", folder, about="train-images-idx3-ubyte.gz: Not a gzipped file")
    refused(FASHION, *fashion_short(), "--batch", "121", about="pass a --batch that is a multiple of 2", workers=2)


def outer_steps_send_less():
    told = train(OUTER, *fashion_short(), "--every", "8", "--compress", "int8")
    accuracies = [float(found) for found in re.findall(r"test accuracy (\d+\.\d\d) %", told)]
    sent = [float(found) for found in re.findall(r"([\d.]+) MB sent", told)]
    expect(len(accuracies) == 3 and min(accuracies) > 40 and min(accuracies[:2]) > 55, told)
    expect(sent[1] < sent[0] / 6 and sent[2] < sent[0] / 6, told)


def gpt_learns_the_same_with_one_and_two_workers():
    needs(TEXT)
    told = [train(GPT, "--data", text, *GPT_SHORT, "--steps", "60", workers=workers)
            for workers, text in ((1, TEXT), (2, plain().name))]
    losses = [last_number("loss", text) for text in told]
    expect(max(losses) < 3.2 and abs(losses[0] - losses[1]) < 0.02, *told)
    expect(all("\nAnd God said" in text for text in told), *told)


def gpt_goes_on_from_a_checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        words = [*gpt_short(), "--steps", "40", "--checkpoint", folder]
        whole = train(GPT, *words)
        expect(sorted(os.listdir(folder)) == ["step-20", "step-40"], whole)
        os.remove(f"{folder}/step-40/.metadata")  # makes it look like an unfinished checkpoint
        resumed = train(GPT, *words)
        expect(f"going on from {folder}/step-20" in resumed and "step    1/" not in resumed, resumed)
        os.remove(f"{folder}/step-40/.metadata")
        alone = train(GPT, *words, workers=1)
        losses = [last_number("loss", text) for text in (whole, resumed, alone)]
        expect(max(losses) - min(losses) < 0.01, losses, whole, resumed, alone)


def gpt_learns_the_same_as_a_pipeline():
    """Another run, with its weights sharded, goes on from a pipeline's checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*gpt_short(), "--steps", "40"]
        piped = train(GPT, *words, "--pipeline", "auto", "--checkpoint", folder)
        expect("stage 0 on rank 0: tokens" in piped and "predicted step" in piped, piped)
        os.remove(f"{folder}/step-40/.metadata")
        resumed = train(GPT, *words, "--checkpoint", folder)
        expect(f"going on from {folder}/step-20" in resumed, resumed)
        losses = [last_number("loss", text) for text in (piped, resumed, train(GPT, *words))]
        expect(max(losses) - min(losses) < 0.01, losses)


def gpt_learns_the_same_with_divided_layers():
    """On two workers and on four, which are two replicas; a sharded run goes on from their checkpoint, and the other way round."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*gpt_short(), "--steps", "40"]
        whole, divided = train(GPT, *words), train(GPT, *words, "--tensor", "2", "--checkpoint", folder)
        os.remove(f"{folder}/step-40/.metadata")
        sharded = train(GPT, *words, "--checkpoint", folder)
        expect(f"going on from {folder}/step-20" in sharded, sharded)
        os.remove(f"{folder}/step-40/.metadata")
        replicas = train(GPT, *words, "--tensor", "2", "--checkpoint", folder, workers=4)
        losses = [last_number("loss", text) for text in (whole, divided, sharded, replicas)]
        expect(max(losses) - min(losses) < 0.01, losses)


def gpt_says_what_it_lacks():
    refused(GPT, "--data", "/nowhere", about="run `apt install bible-kjv-text` or pass --data FILE")
    with tempfile.NamedTemporaryFile() as text:
        text.write(b"In the beginning")
        text.flush()
        refused(GPT, "--data", text.name, about="a text has to be longer than the context")
    with tempfile.NamedTemporaryFile() as text:
        text.write(b"EC02 and no more")
        text.flush()
        refused(GPT, "--data", text.name, about="cannot read")
    refused(GPT, *gpt_short(), "--batch", "7", about="pass a --batch that is a multiple of 2", workers=2)
    refused(GPT, *gpt_short(), "--tensor", "3", about="--tensor 3 has to divide the number of workers, 2", workers=2)


def gpt_refuses_a_torch_that_cannot():
    # A torch that claims to be 2.6. The example must exit before it imports anything that 2.6 lacks.
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "torch.py").write_text("__version__ = '2.6.0+cpu'\n")
        code, out, err = call(sys.executable, GPT / "train.py", env={**os.environ, "PYTHONPATH": folder}, timeout=SECONDS_MAX)
        expect(code == 1 and "FSDP2 runs on CPUs from torch 2.7 on, and this is torch 2.6.0+cpu" in err, out, err)


def torchrun_starts_both():
    needs(IMAGES, TEXT)
    for example, words, word in ((FASHION, fashion_short(), "test accuracy"), (GPT, [*gpt_short(), "--steps", "20"], "loss")):
        code, out, err = call(*TORCHRUN, "--nproc-per-node", "2", example / "train.py", *words, timeout=SECONDS_MAX)
        expect(code == 0 and last_number(word, out) > 0, code, out, err)


def commands_of(readme):
    """Returns the commands in a README's code blocks that train."""
    blocks = re.findall(r"^```\n(.*?)^```", readme.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith("shoal run")]


def the_commands_of_the_readmes_run():
    needs(IMAGES, TEXT)
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(SHOAL.resolve(), f"{folder}/shoal")
        env = {**os.environ, "PATH": f"{folder}:{os.path.dirname(PYTHON)}:{os.environ['PATH']}"}
        for example, short in ((FASHION, fashion_short()), (GPT, [*gpt_short(), "--steps", "20"])):
            commands = commands_of(example / "README.md")
            expect(commands, f"no command in {example}/README.md")
            work = shutil.copytree(example, f"{folder}/{example.name}")  # keeps a command's output files out of the checkout
            for command in commands:
                code, out, err = call(*shlex.split(command), *short, env=env, cwd=work, timeout=SECONDS_MAX)
                expect(code == 0 and "loss" in out, command, code, out, err)


run_cases([
    fashion_mnist_learns_the_same_with_one_and_two_workers,
    fashion_mnist_prints_lines_or_a_bar,
    fashion_mnist_says_what_it_lacks,
    outer_steps_send_less,
    gpt_learns_the_same_with_one_and_two_workers,
    gpt_goes_on_from_a_checkpoint,
    gpt_learns_the_same_as_a_pipeline,
    gpt_learns_the_same_with_divided_layers,
    gpt_says_what_it_lacks,
    gpt_refuses_a_torch_that_cannot,
    torchrun_starts_both,
    the_commands_of_the_readmes_run,
])
