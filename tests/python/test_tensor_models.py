#!/usr/bin/env python3
"""shoal.torch.tensor_parallel on models of transformers: by the plans that they bring, and by the automatic one. Losses and gradients
equal those of one process, and the layers are divided."""
import importlib.util
import os
import pathlib

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
SHOAL = os.path.abspath(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
SECONDS_MAX = 240  # importing transformers takes long when other tests run

SCRIPT = """
import copy, os, sys
import torch, torch.distributed as dist
import transformers
from transformers import (AutoModelForCausalLM, BertConfig, BertForMaskedLM, BloomConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig,
                          Phi3Config, Qwen3Config, T5Config, T5ForConditionalGeneration)
import shoal.torch

transformers.logging.set_verbosity_error()
dist.init_process_group("shoal", init_method="shoal://")
sizes = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32)
gpt2 = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1,
                  eos_token_id=1)
causal = AutoModelForCausalLM.from_config
models = {
    "gpt2": lambda: causal(gpt2), "gpt2 without a kernel": lambda: causal(gpt2, attn_implementation="eager"),
    "llama": lambda: causal(LlamaConfig(**sizes, num_key_value_heads=2)),
    "qwen3": lambda: causal(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8)),
    "neox": lambda: causal(GPTNeoXConfig(**sizes, hidden_dropout=0, attention_dropout=0)),
    "phi3": lambda: causal(Phi3Config(**sizes, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1)),
    "bloom": lambda: causal(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)),
    "opt": lambda: causal(OPTConfig(**{key: value for key, value in sizes.items() if key != "intermediate_size"}, ffn_dim=64,
                                    word_embed_proj_dim=32, dropout=0)),
    "bert": lambda: BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0,
                                                      decoder_start_token_id=0, use_cache=False)),
}
words = torch.randint(96, (2, 10), generator=torch.Generator().manual_seed(3))
mask = torch.ones(2, 10, dtype=torch.long)
mask[1, 7:] = 0
given = dict(input_ids=words, attention_mask=mask, labels=words)
for name, make in models.items():
    torch.manual_seed(1)
    one = make().train()
    model = shoal.torch.tensor_parallel(copy.deepcopy(one))
    assert not any(getattr(module.config, "use_cache", False) for module in model.modules() if hasattr(module, "config")), name
    losses = [each(**given).loss for each in (one, model)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    parts = shoal.torch.tensor._named_parts(model)
    for key, wanted in one.named_parameters():
        own = model.get_parameter(key)
        whole = parts[key].whole(own.grad) if key in parts else own.grad
        torch.testing.assert_close(whole, wanted.grad, atol=1e-5, rtol=1e-4, msg=lambda text: f"{name}: {key}: {text}")
    share = sum(each.numel() for each in model.parameters()) / sum(each.numel() for each in one.parameters())
    assert share < 0.6, (name, share)
    if dist.get_rank() == 0:
        print("equal:", name, flush=True)
"""
NAMES = ("gpt2", "gpt2 without a kernel", "llama", "qwen3", "neox", "phi3", "bloom", "opt", "bert", "t5")


def models_equal_one_process():
    if not importlib.util.find_spec("transformers"):
        raise Skip("no transformers: `make build/trainers/made` brings it")
    import sys
    code, out, err = call(SHOAL, "run", "-n", 2, "--no-prefix", sys.executable, "-c", SCRIPT, timeout=SECONDS_MAX,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    expect(code == 0 and [f"equal: {name}" for name in NAMES] == [line for line in out.splitlines() if line.startswith("equal: ")], out, err)


run_cases([models_equal_one_process])
