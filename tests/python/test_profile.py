#!/usr/bin/env python3
"""shoal.torch.profile: what it measures of small models, that it leaves them as they were, and that the tools read its files."""
import collections
import gc

import ranks  # first: finds a python that has torch
import torch
from profiles import refusals_of, tools_read_the_file_of
from tap import expect, run_cases
from torch import nn

import shoal.torch
from shoal.torch import _backward, _profile

BATCH, INPUTS, HIDDEN, OUTPUTS = 6, 10, 40, 3


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))


refused = refusals_of(shoal.torch.profile)


def gradients_are_in_the_order_of_the_backward_pass():
    profile = shoal.torch.profile(small(), torch.randn(BATCH, INPUTS))
    expect(profile.name == "Sequential" and profile.batch == BATCH and profile.batch_norms == 0, profile)
    expect(profile.forward_ms > 0 and profile.backward_ms > 0, profile)
    names = [each.name for each in profile.gradients]
    expect(sorted(names[:2]) == ["2.bias", "2.weight"] and sorted(names[2:]) == ["0.bias", "0.weight"], names)
    expect({each.name: (each.index, each.elements) for each in profile.gradients} ==
           {"0.weight": (0, INPUTS * HIDDEN), "0.bias": (1, HIDDEN), "2.weight": (2, HIDDEN * OUTPUTS), "2.bias": (3, OUTPUTS)}, profile)
    shares = [each.ready for each in profile.gradients]
    expect(shares == sorted(shares) and 0 <= shares[0] and shares[-1] <= 1, shares)


def activations_are_what_autograd_keeps():
    """A linear layer keeps its input, and the activation its output, which the next layer keeps as well."""
    profile = shoal.torch.profile(small(), torch.randn(BATCH, INPUTS))
    expect(profile.activation_bytes == 4 * (INPUTS + HIDDEN), profile)
    half = shoal.torch.profile(small().to(torch.bfloat16), torch.randn(BATCH, INPUTS, dtype=torch.bfloat16))
    expect(half.activation_bytes == profile.activation_bytes == 2 * half.activation_16_bytes and not profile.activation_16_bytes, half)


def layers_that_repeat_can_be_recomputed():
    """Two blocks, each of which keeps its input and its hidden values. If they are recomputed, their inputs stay, and one block's
    hidden values are there at a time, or the output's, if they are larger."""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, INPUTS))

        def forward(self, x):
            return self.layers(x)

    def recomputed(*blocks, last=OUTPUTS):
        model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Sequential(*blocks), nn.Linear(INPUTS, last), nn.Sigmoid())
        profile = shoal.torch.profile(model, torch.randn(BATCH, INPUTS))
        expect(profile.activation_bytes == 4 * (INPUTS + len(blocks) * (INPUTS + HIDDEN) + INPUTS + last), profile)
        return profile.recomputed_bytes

    expect(recomputed(Block(), Block()) == 4 * (2 * INPUTS + HIDDEN), recomputed(Block(), Block()))
    expect(recomputed(Block(), Block(), Block()) == 4 * (3 * INPUTS + HIDDEN))
    expect(recomputed(Block(), Block(), last=100) == 4 * (2 * INPUTS + INPUTS + INPUTS + 100))  # the model's input, and the last layer's
    expect(recomputed(Block()) == 0 and shoal.torch.profile(small(), torch.randn(BATCH, INPUTS)).recomputed_bytes == 0)


def a_batch_norm_keeps_its_input():
    """The advice for ResNet-50 counts each convolution's output twice: the norm's input, and the activation in place."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
                          nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    profile = shoal.torch.profile(model, torch.randn(4, 3, 16, 16))
    expected = 4 * (3 + 4 * 8) * 256
    expect(profile.batch_norms == 2 and expected <= profile.activation_bytes <= expected + 4 * 4 * 8 * 2, profile, expected)


def units_that_were_measured_are_freed():
    """Pipelines measure units in two halves of a backward pass, which leave the graph whole. It must not hold itself through the
    hook that counts: attention keeps a part of what the layer before it has returned."""
    x = torch.randn(1, 5, 8, requires_grad=True)
    layer = nn.Linear(8, 24)
    kept = _profile._Kept(list(layer.parameters()))
    with kept.counted():
        query, key, value = layer(x).view(1, 5, 3, 1, 8).permute(2, 0, 3, 1, 4)
        output = nn.functional.gelu(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
    _, rest = _backward.input_gradients([output], [torch.ones_like(output)], [x])
    rest()
    expect(kept.bytes >= 4 * 5 * (24 + 8), kept.bytes)
    del query, key, value, output, rest
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.untyped_storage().nbytes() == 4 * 5 * 24]
    expect(not alive, "the output of the layer is alive", alive)


def the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    model[0].weight.grad = kept = torch.ones(4, 4)
    before, state = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    shoal.torch.profile(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), steps=2)
    expect(model[0].weight.grad is kept and bool((kept == 1).all()) and model[0].bias.grad is None, "gradients")
    expect(all(torch.equal(before[key], value) for key, value in model.state_dict().items()), "buffers and parameters")
    expect(torch.equal(state, torch.get_rng_state()) and model.training, "random numbers, mode")


def a_failed_step_also_leaves_the_model():
    class Fails(nn.Linear):
        def forward(self, x):
            raise RuntimeError("in the model")
    model = Fails(2, 2)
    model.weight.grad = kept = torch.zeros(2, 2)
    refused(RuntimeError, "in the model", model, torch.zeros(3, 2))
    expect(model.weight.grad is kept, "gradients")


def examples_have_several_forms():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, one, other=None):
            loss = self.layer(one if other is None else one + other).sum()
            return collections.namedtuple("Output", ["loss", "numbers"])(loss, torch.zeros(3))
    x = torch.ones(5, 2)
    for example in (x, (x, x), [x], {"one": x, "other": x}):
        expect(shoal.torch.profile(Pair(), example).batch == 5, example)
    profile = shoal.torch.profile(Pair(), (x,), batch=20, name="mine", loss=lambda output: 2 * output.loss)
    expect((profile.batch, profile.name) == (20, "mine"), profile)


def frozen_and_unused_parameters():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "frozen": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["frozen"](model["used"](x))
    found = {each.name: each for each in shoal.torch.profile(model, torch.ones(3, 2)).gradients}
    expect(set(found) == {"used.weight", "used.bias", "unused.weight", "unused.bias"}, found)
    expect(found["unused.weight"].ready == found["unused.bias"].ready == 1, found)
    expect(sorted(each.index for each in found.values()) == [0, 1, 2, 3], found)


def tools_read_the_file():
    tools_read_the_file_of(shoal.torch.profile(small(), torch.randn(BATCH, INPUTS), name="mine" + 200 * "é"), INPUTS + HIDDEN)


def wrong_arguments_are_refused():
    x = torch.randn(BATCH, INPUTS)
    refused(ValueError, "no parameter that requires a gradient", nn.ReLU(), x)
    refused(ValueError, "steps is 0", small(), x, steps=0)
    refused(ValueError, "batch is 0", small(), x, batch=0)
    refused(ValueError, "pass batch=", small(), ())
    refused(ValueError, "a tensor of one element", small(), x, lambda output: output)

    class Counts(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax()
    refused(ValueError, "pass loss=", Counts(INPUTS, 2), x)


if __name__ == "__main__":
    run_cases([gradients_are_in_the_order_of_the_backward_pass, activations_are_what_autograd_keeps, layers_that_repeat_can_be_recomputed, a_batch_norm_keeps_its_input, units_that_were_measured_are_freed,
               the_model_is_left_as_it_was, a_failed_step_also_leaves_the_model, examples_have_several_forms,
               frozen_and_unused_parameters, tools_read_the_file, wrong_arguments_are_refused])
