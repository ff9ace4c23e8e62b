#!/usr/bin/env python3
"""The vendor's published script for version 2 (Llama and GPT-NeoX), as it is, on processes without a GPU. Its losses are those of one
process for each degree; it saves checkpoints of each kind and continues from them.

`dev/published.py` fetches it. What the script needs of a GPU, of FlashAttention, of Transformer Engine and of Megatron answers without
doing anything (SHIM); no line of the script changes."""
import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile

import ranks  # first: finds a Python with torch, and sets the path to shoal for children  # noqa: F401
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import warm
from tap import Skip, call, expect, run_cases

try:
    import accelerate  # noqa: F401
    import transformers
    import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
except ImportError:
    print("1..0 # SKIP no transformers and accelerate: run it with build/trainers/bin/python3")
    sys.exit(0)

TOP = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = TOP / "build/published/tsm/train.py"
SHOAL = os.path.abspath(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
PYTHON = warm.start()  # importing transformers takes six seconds of CPU time
SECONDS_MAX = 300
STEPS, WORDS, LENGTH, LINES = 4, 96, 16, 64

SHIM = """
import os, runpy, sys, types
import accelerate, torch, transformers

for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
    setattr(torch.cuda, name, lambda *args, **kwargs: None)
for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device"):
    setattr(torch.cuda, name, lambda *args, **kwargs: 0)
torch.cuda.device_count = lambda: 8
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None

def module(name, **content):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(content)

for name in ("transformer_engine", "transformer_engine.common", "megatron", "megatron.core", "megatron.core.dist_checkpointing"):
    module(name)
module("transformer_engine.common.recipe", Format=object, DelayedScaling=object)
module("megatron.core.dist_checkpointing.mapping", CheckpointingException=RuntimeError)
module("datasets", load_from_disk=None)

from_config = transformers.AutoModelForCausalLM.from_config
transformers.AutoModelForCausalLM.from_config = lambda config, attn_implementation: from_config(config, attn_implementation="sdpa")
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHAPE = {"max_context_width": LENGTH, "vocab_size": WORDS, "hidden_width": 32, "num_layers": 2, "num_heads": 4, "num_key_value_heads": 2,
         "llama_intermediate_size": 48, "max_steps": STEPS, "bf16": 0, "fp8": 0, "log_reduced_training_loss": 1, "zipped_data": 0,
         "dataset_type": "gpt_jsonl", "use_smp_implementation": 1, "num_kept_checkpoints": 1, "lr": 0.01, "lr_decay_iters": 10,
         "warmup": 0.1, "validation_batches": 2}


class Run:
    """Runs of the script that share a folder with data and checkpoints."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        draw = random.Random(1)
        for name, kind in (("train", "training"), ("test", "testing")):
            (self.folder / name).mkdir()
            starts = [draw.randrange(WORDS) for _ in range(LINES)]
            lines = [{"input_ids": [(start + 5 * place) % WORDS for place in range(LENGTH)], "attention_mask": [1] * LENGTH}
                     for start in starts]
            (self.folder / name / f"{kind}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def checkpoints(self):
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def __call__(self, count, rows, parameters, model_type="llama_v2", code=0, **more):
        """Trains on `count` processes with `rows` of the batch on each replica. Returns the losses by step, then those of
        validation."""
        words = {**SHAPE, "model_type": model_type, "train_batch_size": rows, "val_batch_size": max(rows // 2, 1), "training_dir": self.folder / "train",
                 "test_dir": self.folder / "test", "checkpoint_dir": self.folder / "checkpoints", "checkpoint_freq": 2 * STEPS, **more}
        listed = [word for name, value in words.items() for word in (f"--{name}", value)]
        environment = {**os.environ, "SM_HP_MP_PARAMETERS": json.dumps(parameters), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        found, out, err = call(SHOAL, "run", "-n", count, PYTHON, "-c", SHIM, SCRIPT, *listed, env=environment,
                               timeout=SECONDS_MAX)
        text = out + err
        expect(found == code, text[-6000:])
        self.text = text
        return ({int(step): float(loss) for step, loss in re.findall(r"Batch (\d+) Loss: ([\d.]+),", text)},
                [float(loss) for loss in re.findall(r"Validation loss: ([\d.]+)", text)])


def alike(found, wanted):
    expect(found[0].keys() == wanted[0].keys() and len(found[1]) == len(wanted[1]), found, wanted)
    for mine, other in zip([*found[0].values(), *found[1]], [*wanted[0].values(), *wanted[1]]):
        expect(abs(mine - other) < 1e-3, found, wanted)


def losses_are_those_of_one_process():
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        for kind in ("llama_v2", "gpt_neox"):
            wanted = run(1, 4, {}, kind, delayed_param=0, validation_freq=2)
            expect(len(wanted[0]) == STEPS and len(wanted[1]) == STEPS // 2 and wanted[0][0] > wanted[0][STEPS - 1], wanted)
            for parameters in ({"hybrid_shard_degree": 2}, {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}):
                rows = 4 // (2 if "hybrid_shard_degree" in parameters else 1)
                alike(run(2, rows, parameters, kind, delayed_param=0, validation_freq=2), wanted)


def degrees_go_together():
    """Also with delayed values, whose order of random numbers is that of FSDP on every degree."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        wanted = run(1, 4, {})
        alike(run(4, 4, {"hybrid_shard_degree": 2, "context_parallel_degree": 2, "tensor_parallel_degree": 2}, cp_comm_type="all_gather"),
              wanted)
        alike(run(4, 1, {"hybrid_shard_degree": 2}), wanted)
        # Without the vendor's layers the script leaves tensor parallelism out.
        alike(run(2, 2, {"tensor_parallel_degree": 2}, use_smp_implementation=0, use_orig_params=1, sharding_strategy="full_shard"),
              wanted)


def training_continues_from_checkpoints():
    for count, parameters, kind in ((2, {"hybrid_shard_degree": 2}, "sharded"), (2, {"hybrid_shard_degree": 2}, "async_sharded"),
                                    (4, {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, "sharded")):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(folder)
            wanted = run(count, 2, parameters, checkpoint_type=kind, checkpoint_freq=2)
            expect(run.checkpoints() == (["llama_v2-4steps"] if kind == "sharded" else ["llama_v2-2steps", "llama_v2-4steps"]),
                   run.checkpoints())
            shutil.rmtree(run.folder / "checkpoints")  # else the script removes the checkpoints of fewer steps
            first = run(count, 2, parameters, checkpoint_type=kind, checkpoint_freq=2, max_steps=2)
            expect({step: wanted[0][step] for step in first[0]} == first[0], first, wanted)
            found = run(count, 2, parameters, checkpoint_type=kind, max_steps=STEPS, save_final_model=1,
                        resume_from_checkpoint=run.folder / "checkpoints/llama_v2-2steps")
            expect(sorted(found[0]) == [2, 3], found)
            alike((found[0], []), ({step: wanted[0][step] for step in found[0]}, []))
            final_model_is_whole(run.folder / "checkpoints/model")


def final_model_is_whole(folder):
    """As transformers reads it: with tensor parallelism as well."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    values = torch.load(folder / "pytorch_model.bin")
    model.load_state_dict(values)
    expect(all(torch.isfinite(value).all() for value in values.values()))


def local_checkpoints_are_saved():
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        for kind in ("local", "async_local"):
            run(2, 2, {"hybrid_shard_degree": 2}, checkpoint_type=kind, checkpoint_freq=2)
            expect("llama_v2-4steps" in run.checkpoints(), run.checkpoints())
        run(2, 2, {"hybrid_shard_degree": 2}, checkpoint_type=kind, max_steps=6,
            resume_from_checkpoint=run.folder / "checkpoints/llama_v2-4steps")
        expect("Checkpoint loaded from" in run.text, run.text[-3000:])


def what_is_not_served_ends_with_a_remedy():
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run(1, 2, {}, code=1, moe=1)
        expect("mixtures of experts are not served: train the model as it is (moe=0)" in run.text, run.text[-3000:])
        run(2, 2, {"expert_parallel_degree": 2}, code=1)
        expect("expert_parallel_degree 2 is not served" in run.text, run.text[-3000:])


def skipped():
    raise Skip("there is no build/published/tsm: dev/published.py fetches it")


run_cases([losses_are_those_of_one_process, degrees_go_together, training_continues_from_checkpoints, local_checkpoints_are_saved,
           what_is_not_served_ends_with_a_remedy] if SCRIPT.exists() else [skipped])
