"""`python -m shoal checkpoint`: lists sharded checkpoints, shows one, and converts it from and to one plain file."""
from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time

from . import _native, checkpoint

TORCH = (".pt", ".pth", ".bin")

OVERVIEW = """\
A sharded checkpoint is a folder with a file of each rank (docs/checkpoints.md). Examples:

  python -m shoal checkpoint list checkpoints
  python -m shoal checkpoint show checkpoints --verify
  python -m shoal checkpoint whole checkpoints model.safetensors     one file of the values, for any framework
  python -m shoal checkpoint whole checkpoints all.pt --step 4000    model and optimizer, for torch.load
  python -m shoal checkpoint shard model.safetensors checkpoints     and back: any number of ranks loads it

Exit codes: 0; 1 if a checkpoint is missing or damaged, or a file cannot be written; 2 for wrong arguments."""


def _size(count):
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024


def _facts(opened):
    return {"step": opened.step, "saved_at": opened.saved_at, "optimizer": opened.optimizer, "shards": opened.shards,
            "bytes": opened.file_bytes, "parameters": len(opened.parameters)}


def _line(facts):
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["saved_at"]))
    return (f"step {facts['step']}: saved {saved}, {facts['shards']} {'shard' if facts['shards'] == 1 else 'shards'}, "
            f"{_size(facts['bytes'])}, {facts['parameters']} parameters, {facts['optimizer'] or 'values only'}")


def list_checkpoints(words):
    found, is_damaged = [], False
    for step in checkpoint.steps(words.folder):
        try:
            with checkpoint.Checkpoint(words.folder, step) as opened:
                found.append(_facts(opened))
        except _native.ShoalError as error:
            is_damaged = True
            found.append({"step": step, "error": str(error)})
    if words.json:
        print(json.dumps(found))
    else:
        for facts in found:
            print(f"step {facts['step']}: damaged: {facts['error']}" if "error" in facts else _line(facts))
        if not found:
            print(f"{words.folder} has no complete checkpoint")
    return 1 if is_damaged or not found else 0


def show(words):
    with checkpoint.Checkpoint(words.folder, words.step) as opened:
        if words.verify:
            opened.verify()
        facts = _facts(opened)
        facts["verified"] = words.verify
        facts["parameters"] = [{"name": each.name, "type": each.type, "shape": each.shape, "steps": each.steps, "states": each.states}
                               for each in opened.parameters]
        if words.json:
            print(json.dumps(facts))
            return 0
        print(_line({**facts, "parameters": len(opened.parameters)}) + (", all checksums are right" if words.verify else ""))
        width = max((len(each.name) for each in opened.parameters), default=0)
        for each in opened.parameters:
            print(f"  {each.name:{width}}  {each.type:5} {str(each.shape):20} {math.prod(each.shape):12,} elements, {each.steps} steps, "
                  f"{each.states} states")
    return 0


def whole(words):
    is_torch = pathlib.Path(words.file).suffix in TORCH
    step = (checkpoint.to_torch if is_torch else checkpoint.to_safetensors)(words.folder, words.file, words.step)
    _told(words, {"file": words.file, "step": step}, f"{words.file}: step {step}")
    return 0


def shard(words):
    buffers = checkpoint.BUFFERS if words.buffers is None else tuple(words.buffers)
    if pathlib.Path(words.file).suffix in TORCH:
        step = checkpoint.from_torch(words.file, words.folder, words.step, buffers)
    else:
        step = words.step or 0
        checkpoint.from_safetensors(words.file, words.folder, step, buffers)
    _told(words, {"folder": words.folder, "step": step}, f"{words.folder}: step {step}")
    return 0


def _told(words, facts, line):
    print(json.dumps(facts) if words.json else line)


def _suffix(path):
    if pathlib.Path(path).suffix not in (*TORCH, ".safetensors"):
        raise argparse.ArgumentTypeError(f"{path}: the name must end with .safetensors, or for PyTorch with {', '.join(TORCH)}")
    return path


def _number(text):
    if not text.isdecimal() or int(text) >= _native.CHECKPOINT_LATEST:
        raise argparse.ArgumentTypeError(f"{text} is not a step: steps are numbers from 0")
    return int(text)


def parser():
    top = argparse.ArgumentParser(prog="python -m shoal checkpoint", description=OVERVIEW,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name, run, text, *arguments):
        own = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for words, options in arguments:
            own.add_argument(*words, **options)
        own.add_argument("--json", action="store_true", help="print JSON")
        own.set_defaults(run=run)
    folder = (("folder",), {"help": "the folder of the checkpoints"})
    step = (("--step",), {"type": _number, "help": "the checkpoint's step; the latest if left out"})
    command("list", list_checkpoints, "list the complete checkpoints of a folder", folder)
    command("show", show, "show the parameters of a checkpoint", folder, step,
            (("--verify",), {"action": "store_true", "help": "read all values and compare their checksums"}))
    command("whole", whole, "write a checkpoint as one plain file", folder,
            (("file",), {"type": _suffix, "help": ".safetensors: the values; .pt: model and optimizer of PyTorch"}), step)
    command("shard", shard, "write a checkpoint from one plain file",
            (("file",), {"type": _suffix, "help": ".safetensors, or a .pt of a dict of model and optimizer"}), folder,
            (("--step",), {"type": _number, "help": "the checkpoint's step; 0, or that of the .pt, if left out"}),
            (("--buffers",), {"nargs": "*", "metavar": "NAME", "help": "last parts of the names of tensors that are the module's "
                                                                       f"buffers (default: {' '.join(checkpoint.BUFFERS)})"}))
    return top


def main(arguments) -> int:
    words = parser().parse_args(arguments)
    try:
        return words.run(words)
    except (_native.ShoalError, OSError, ValueError, ImportError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
