#!/usr/bin/env python3
"""A GPT-2 of transformers in partitions, as the vendor's scripts make, mark, checkpoint and train it: losses and the gathered state
equal those of one process."""
import importlib.util
import json
import os
import pathlib
import sys
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
SHOAL = os.path.abspath(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
SECONDS_MAX = 240  # importing transformers takes long when other tests run

SCRIPT = """
import copy, os
import torch
from transformers import AutoModelForCausalLM, GPT2Config
import smdistributed.modelparallel.torch as smp

is_tensor = "tensor" in os.environ["HOW"]  # then the ranks of a TP group are given the same batch
smp.init({"ddp": True, "tensor_parallel_degree": 1 + is_tensor, "prescaled_batch": is_tensor, "pipeline_parallel_degree": 2, "microbatches": 4, "optimize": "speed",
          "auto_partition": "manual" not in os.environ["HOW"], "default_partition": 0})
torch.manual_seed(1)
config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
                    bos_token_id=1, eos_token_id=1, return_dict=True)
with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.get_default_dtype()):
    plain = AutoModelForCausalLM.from_config(config)
one = copy.deepcopy(plain)
model = smp.DistributedModel(plain, trace_device="gpu")
layers = model.get_module().transformer.h
if "manual" in os.environ["HOW"]:
    for number, layer in enumerate(layers.children()):
        smp.set_partition(layer, number // 3)
# Adam would make steps of the rounding errors that are the gradients of biases of keys.
optimizer_of = (lambda each: torch.optim.SGD(each, lr=0.1)) if is_tensor else (lambda each: torch.optim.AdamW(each, lr=1e-2))
optimizer = optimizer_of(model.get_module().parameters())
if "checkpoint" in os.environ["HOW"]:
    smp.set_activation_checkpointing(layers)
optimizer = smp.DistributedOptimizer(optimizer, static_loss_scale=None, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 1000})
other = optimizer_of(one.parameters())

@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss

@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)

def batch(number, replica):
    torch.manual_seed(10 * number + replica)
    return torch.randint(97, (8, 16)), torch.ones(8, 16, dtype=torch.long)

for number in range(3):
    batches = [batch(number, replica) for replica in range(smp.rdp_size())]
    optimizer.zero_grad(set_to_none=True)
    other.zero_grad()
    # Only pp_rank 0 reads, as in the vendor's scripts.
    ids, mask = batches[smp.rdp_rank()] if smp.pp_rank() == 0 else (torch.zeros(8, 0), torch.zeros(8, 0))
    loss = train_step(model, optimizer, ids, mask, None).reduce_mean()
    losses = [one(input_ids=ids, attention_mask=mask, labels=ids)["loss"] for ids, mask in batches]
    (sum(losses) / len(losses)).backward()
    torch.testing.assert_close(loss, losses[smp.rdp_rank()].detach(), rtol=1e-5, atol=1e-5)
    optimizer.step()
    other.step()
model.eval()
ids, mask = batch(9, 0)
with torch.no_grad():
    found, wanted = test_step(model, ids, mask), one.eval()(input_ids=ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(found["logits"].concat(), wanted["logits"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found["loss"].reduce_mean(), wanted["loss"], rtol=1e-4, atol=1e-4)
for name, value in one.state_dict().items():
    torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-3)
names = {name.split(".")[2] for name, _ in model.local_named_parameters() if name.startswith("transformer.h.")}
print(f"rank {smp.rank()} equals one process and has blocks", *sorted(names), flush=True)
"""


def trained(count, how):
    """Returns the output of a run of the script."""
    if not importlib.util.find_spec("transformers"):
        raise Skip("no transformers here")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT)
        script.flush()
        code, out, err = call(SHOAL, "run", "-n", str(count), sys.executable, script.name, env={**os.environ, "HOW": how}, timeout=SECONDS_MAX)
    expect(code == 0 and all(f"rank {rank} equals one process" in out for rank in range(count)), out, err)
    return out


def two_partitions_train():
    trained(2, "")


def manual_partitions_with_checkpoints_train():
    out = trained(2, "manual checkpoint")
    expect("rank 0 equals one process and has blocks 0 1 2\n" in out and "rank 1 equals one process and has blocks 3\n" in out, out)


def replicas_train():
    trained(4, "")


def divided_layers_train():
    """Two partitions of two ranks each, which divide the layers."""
    trained(4, "tensor checkpoint")


def parameters_of_the_environment_count():
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"partitions": 1})
    try:
        trained(1, "")
    finally:
        del os.environ["SM_HP_MP_PARAMETERS"]


run_cases([two_partitions_train, manual_partitions_with_checkpoints_train, replicas_train, divided_layers_train, parameters_of_the_environment_count])
