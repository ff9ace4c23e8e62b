#!/usr/bin/env python3
"""Memory that a forward pass keeps for its backward pass: what `shoal advise` predicts, and what shoal.torch.profile measures.

  bench/activations.py                   ResNet-50, BERT-large and GPT-2, with one and two samples, on the CPU
  bench/activations.py --models gpt2     only some

It needs torch and transformers: build/trainers/bin/python3, and SHOAL_LIBRARY and SHOAL_COMMAND of a build. The table is that of
docs/advice.md. It takes three minutes."""
import argparse
import json
import os
import pathlib
import subprocess
import sys

import torch
from torch import nn

TOP = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP / "python"))
import shoal.torch  # noqa: E402

COMMAND = os.environ.get("SHOAL_COMMAND", TOP / "build/shoal")
MIB = 1 << 20


def normalized(inputs, outputs, side, stride=1):
    return [nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """A bottleneck block, whose sum and activation are in place."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(*normalized(inputs, width, 1), nn.ReLU(True), *normalized(width, width, 3, stride), nn.ReLU(True),
                                  *normalized(width, 4 * width, 1))
        self.fit = nn.Sequential(*normalized(inputs, 4 * width, 1, stride)) if inputs != 4 * width else nn.Identity()

    def forward(self, x):
        y = self.body(x)
        y += self.fit(x)
        return torch.relu_(y)


def resnet50():
    layers, inputs = [*normalized(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)], 64
    for count, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(count):
            layers.append(Block(inputs, width, 2 if block == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def language_model(name):
    import transformers
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="sdpa"))
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return transformers.BertForPreTraining(transformers.BertConfig(**large, attn_implementation="sdpa"))


def measured(name, samples):
    if name == "resnet50":
        return shoal.torch.profile(resnet50(), torch.randn(samples, 3, 224, 224), steps=1)
    words, length = (50257, 1024) if name == "gpt2" else (30522, 512)
    example = {"input_ids": torch.randint(words, (samples, length)), "labels": torch.randint(words, (samples, length))}
    if name == "bert-large":
        example["next_sentence_label"] = torch.zeros(samples, dtype=torch.long)
    return shoal.torch.profile(language_model(name).train(), example, steps=1)


def predicted(name, samples):
    words = ("advise", "--profile", name, "--samples", 1000, "--batch", samples, "--machine", "this", "--worker-memory", "1000G",
             "--format", "json")
    out = subprocess.run([str(COMMAND), *map(str, words)], check=True, capture_output=True, text=True).stdout
    return json.loads(out)["points"][0]["ladder"][0]["activations_bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,bert-large,gpt2")
    options = parser.parse_args()
    print("| model | samples | measured, MiB | predicted, MiB | predicted / measured |\n|---|---|---|---|---|")
    for name in options.models.split(","):
        for samples in (1, 2):
            found, expected = samples * measured(name, samples).activation_bytes / MIB, predicted(name, samples) / MIB
            print(f"| {name} | {samples} | {found:.1f} | {expected:.1f} | {expected / found:.3f} |", flush=True)


if __name__ == "__main__":
    main()
