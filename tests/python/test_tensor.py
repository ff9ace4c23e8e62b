#!/usr/bin/env python3
"""shoal.torch.tensor_parallel: losses, gradients and states equal those of one process, whatever the model's code does between its
layers, alone and with data parallelism, shards and pipelines; and each misuse has its error."""
import copy
import logging
import math
import os
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn
from torch.nn import functional

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
WIDTH, HEADS, WORDS, CONTEXT = 24, 4, 32, 8


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


# ---- Models ----------------------------------------------------------------------------------------------------------------


def attend(query, key, value):
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Viewed(nn.Module):
    """Queries, keys and values of one layer, as a view of five dimensions."""

    def __init__(self, bias=True):
        super().__init__()
        self.heads = HEADS
        self.query_key_value, self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.mix(attend(*heads).transpose(1, 2).reshape(batch, length, width))


class Chunked(nn.Module):
    """Like Viewed by split(), scores with a mask that is a buffer, and dropout; as in many small GPTs."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(functional.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Grouped(nn.Module):
    """Separate queries, and fewer keys and values; rotations; norms of heads; a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.size = HEADS, 2, 6
        self.q_proj, self.k_proj = nn.Linear(WIDTH, HEADS * 6, bias=False), nn.Linear(WIDTH, 12, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, 12, bias=False), nn.Linear(HEADS * 6, WIDTH, bias=False)
        self.q_norm, self.gain = nn.LayerNorm(6), nn.Parameter(torch.tensor([0.9, 1.1, 1.0, 0.8, 1.2, 1.0]))

    def rotated(self, x):
        turn = torch.outer(torch.arange(x.shape[2]), torch.tensor([1.0, 0.1, 0.01])).repeat(1, 2)
        return x * turn.cos() + torch.cat((-x[..., 3:], x[..., :3]), -1) * turn.sin()

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.size)
        q = self.rotated(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2))
        k, v = self.rotated(self.k_proj(x).view(shape).transpose(1, 2) * self.gain), self.v_proj(x).view(shape).transpose(1, 2)
        k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for each in (k, v))
        return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))


class ByHead(nn.Module):
    """Queries, keys and values of a head side by side, which the automatic plan cannot know."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.query_key_value(x).view(*x.shape[:-1], HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        return self.dense(attend(*heads).transpose(1, 2).reshape(x.shape))


class Feed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * WIDTH, WIDTH))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Conv1D(nn.Module):
    """Like the linear layer of transformers whose weight has its input features first."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.1), nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Old(nn.Module):
    """The layers of GPT-2 in transformers."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x):
        return self.c_proj(functional.gelu(self.c_fc(x)))


class Torch(nn.Module):
    """torch's own attention, with a mask and joined, separate and averaged forms."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        found, weights = self.attention(x, x, x, attn_mask=mask)
        key = x * 2
        return found + weights.sum(-1, keepdim=True) * 0.1 + self.attention(x, key, x + 1, need_weights=False)[0]


class Block(nn.Module):
    def __init__(self, attention, feed):
        super().__init__()
        self.norm_attention, self.attention, self.norm_feed, self.feed = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH), feed()

    def forward(self, x):
        x = x + self.attention(self.norm_attention(x))
        return x + self.feed(self.norm_feed(x))


class Gpt(nn.Module):
    def __init__(self, attention=Viewed, feed=Feed, layers=2, tied=False, words=WORDS):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, feed) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"viewed": lambda: Gpt(), "chunked, tied": lambda: Gpt(Chunked, Gated, tied=True), "grouped": lambda: Gpt(Grouped, Packed),
          "by head": lambda: Gpt(ByHead, Old, tied=True), "torch's attention": lambda: Gpt(Torch, Feed), "odd words": lambda: Gpt(words=33),
          "torch's attention of other sizes": lambda: Gpt(lambda: Torch(kdim=WIDTH, vdim=WIDTH, bias=False))}


def batch_of(step, rows=4, words=WORDS):
    torch.manual_seed(1000 + step)
    tokens = torch.randint(words, (rows, CONTEXT))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(result, following):
    return functional.cross_entropy(result.flatten(0, 1), following.flatten())


# ---- Comparisons -----------------------------------------------------------------------------------------------------------


def close(one, other, what="", tolerance=2e-5):
    gap = max((a.detach().double() - b.detach().double()).abs().max().item() for a, b in zip(one, other))
    expect(gap <= tolerance, what, "differs by", gap)


def fails(call, kind, *words):
    try:
        call()
    except kind as error:
        text = str(error)
        expect(text.startswith("shoal: ") and all(word in text for word in words), text, words)
        return
    raise AssertionError(f"no {kind.__name__} with {words}")


def sgd(model):
    """Adam would make steps of rounding errors if a gradient is 0, as that of a bias of keys is."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trains_like_one(one, model, run, steps=3, rows=4, what="", tolerance=2e-5):
    """run(step) trains the divided model for a step and returns (loss, norm)."""
    optimizer = sgd(one)
    for step in range(steps):
        inputs, following = batch_of(step, rows)
        optimizer.zero_grad()
        loss = loss_of(one(inputs), following)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        optimizer.step()
        own_loss, own_norm = run(step)
        close([torch.as_tensor(own_loss)], [loss], (what, "loss", step), tolerance)
        if own_norm is not None:
            close([own_norm], [norm], (what, "norm", step), 10 * tolerance)
    state = tools().full_state_dict(model, to=None)
    expect(list(state) == list(one.state_dict()), list(state))
    close(state.values(), one.state_dict().values(), (what, "state"), 10 * tolerance)


def tools():
    import shoal.torch
    return shoal.torch.tensor


def divided(model, mesh=None, **options):
    import shoal.torch
    return shoal.torch.tensor_parallel(model, mesh, **options)


def runner(model, rows=4):
    optimizer = sgd(model)

    def run(step):
        inputs, following = batch_of(step, rows)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), following)
        loss.backward()
        norm = tools().clip_grad_norm_(model, 0.5)
        optimizer.step()
        return loss.detach(), norm
    return run


# ---- Tensor parallelism alone ----------------------------------------------------------------------------------------------


def model_case(name):
    def body(world):
        one = seeded(MODELS[name])
        model = divided(copy.deepcopy(one))
        trains_like_one(one, model, runner(model), what=name)
    return Case(f"equals one process: {name}", body, sizes=(2,))


def ranks_have_parts(world):
    """Each rank has its share of the layers, and nothing is gathered if the plan fits."""
    one = seeded(lambda: Gpt(layers=1))
    whole = sum(each.numel() for each in one.parameters())
    model = divided(copy.deepcopy(one))
    kept = [each for name, each in one.named_parameters() if "norm" in name or name == "places.weight" or name.endswith(("mix.bias", "feed.3.bias"))]
    expected = sum(each.numel() for each in kept)
    own = sum(each.numel() for each in model.parameters())
    expect(own == expected + (whole - expected) // world.size, own, whole)
    gathered = []
    team = model.head._shoal.team
    plain = team.gather
    team.gather = lambda tensor: gathered.append(tuple(tensor.shape)) or plain(tensor)
    model(batch_of(0)[0])
    expect(gathered == [(4, CONTEXT - 1, WORDS // world.size)], "only the scores of words are gathered:", gathered)


def degrees_agree(world):
    """Four ranks, and one that has everything."""
    one = seeded(lambda: Gpt(feed=Gated))
    model = divided(copy.deepcopy(one))
    trains_like_one(one, model, runner(model))


def transformers_of_torch(world):
    """nn.TransformerEncoderLayer and DecoderLayer, in training and in evaluations, for which torch has a path of its own."""
    def make():
        layers = {"encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True), 2),
                  "decoder": nn.TransformerDecoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)}
        return nn.ModuleDict(layers)
    one = seeded(make)
    model = divided(copy.deepcopy(one))
    x, y = torch.randn(3, 5, WIDTH), torch.randn(3, 4, WIDTH)
    padding = torch.arange(5)[None] >= torch.tensor([[5], [3], [4]])

    def run(each):
        memory = each["encoder"](x, src_key_padding_mask=padding)
        return each["decoder"](y, memory, memory_key_padding_mask=padding)
    results = [run(each) for each in (one, model)]
    close(results[:1], results[1:], "training")
    for result in results:
        result.square().mean().backward()
    parts = tools()._named_parts(model)
    close([parts[name].whole(each.grad) if name in parts else each.grad for name, each in model.named_parameters()],
          [each.grad for each in one.parameters()], "gradients")
    with torch.no_grad():
        close([run(one.eval())], [run(model.eval())], "evaluation")


def attention_forms(world):
    """Forms of nn.MultiheadAttention: sequence first, without a batch, masks of heads, weights of heads."""
    one = seeded(lambda: nn.ModuleList([nn.MultiheadAttention(WIDTH, HEADS)]))
    model = divided(copy.deepcopy(one))
    one, model = one[0], model[0]
    x, mask = torch.randn(5, 3, WIDTH), torch.randn(3 * HEADS, 5, 5)
    for words in ({}, {"attn_mask": mask}, {"average_attn_weights": False}, {"need_weights": False, "attn_mask": mask},
                  {"key_padding_mask": torch.zeros(3, 5, dtype=torch.bool).index_fill(1, torch.tensor([4]), True)}):
        for wanted, found in zip(one(x, x, x, **words), model(x, x, x, **words)):
            expect((wanted is None) == (found is None), words)
            if wanted is not None:
                close([wanted], [found], words)
    single = x[:, 0]
    close(one(single, single, single), model(single, single, single), "without a batch")
    fails_plain(lambda: model(x, x, x, is_causal=True), RuntimeError, "attn_mask")


def fails_plain(call, kind, *words):
    try:
        call()
    except kind as error:
        expect(all(word in str(error) for word in words), str(error))
        return
    raise AssertionError(f"no {kind.__name__}")


def meta_models_get_values(world):
    """A model on the device meta has the values of one that is made in one process with the same seed."""
    def make():
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2))
    with torch.device("meta"):
        model = make()
    torch.manual_seed(5 + world.rank)  # the first rank's values count
    divided(model, plan={"0": "colwise", "2": "rowwise"})
    expect(not any(each.is_meta for each in model.parameters()), "a parameter has no memory")
    expect(tuple(model[0].weight.shape) == (16 // world.size, 8), model[0].weight.shape)
    one = seeded(make, 5)
    close(tools().full_state_dict(model, None).values(), one.state_dict().values(), tolerance=0)
    with torch.device("meta"):
        model = make()
    divided(model, init=lambda module: [nn.init.constant_(each, 0.5) for each in module.parameters(recurse=False)])
    expect(all((each == 0.5).all() for each in model.parameters()), "init was not called")
    with torch.device("meta"):
        model = Gpt(Old, Old)
    fails(lambda: divided(model), ValueError, "Conv1D", "reset_parameters()", "init=")


def values_are_the_first_ranks(world):
    one = seeded(lambda: Gpt(), 1)
    model = divided(seeded(lambda: Gpt(), 1 + world.rank))
    close(tools().full_state_dict(model, None).values(), one.state_dict().values(), tolerance=0)


def states_are_whole(world):
    """States of the model and its optimizer are those of one process, and load into a divided model and into a whole one."""
    one = seeded(lambda: Gpt(Chunked, tied=True))
    model = divided(copy.deepcopy(one))
    run = runner(model)
    run(0)
    state = tools().full_state_dict(model, to=world.size - 1)
    expect(bool(state) == (world.rank == world.size - 1), "the state is on another rank")
    state = tools().full_state_dict(model, to=None)
    one.load_state_dict(state)
    other = divided(seeded(lambda: Gpt(Chunked, tied=True), 7))
    tools().load_full_state_dict(other, state)
    inputs, following = batch_of(1)
    close([loss_of(one(inputs), following)], [loss_of(other(inputs), following)])
    fails(lambda: tools().load_full_state_dict(other, {**state, "head.weight": torch.zeros(3, 4)}), ValueError, "head.weight", "[3, 4]", "[32, 24]")
    fails_plain(lambda: tools().load_full_state_dict(other, {}), RuntimeError, "Missing")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (one, other)]
    for each, optimizer in zip((one, other), optimizers):
        optimizer.zero_grad()
        loss_of(each(inputs), following).backward()
        optimizer.step()
    whole = tools().full_optimizer_state_dict(other, optimizers[1], to=None)
    wanted = optimizers[0].state_dict()
    expect(whole["state"].keys() == wanted["state"].keys(), whole["state"].keys())
    for number, values in wanted["state"].items():
        close(whole["state"][number].values(), values.values(), number, 1e-6)
    again = torch.optim.AdamW(other.parameters(), lr=0.01)
    tools().load_full_optimizer_state_dict(other, again, wanted)
    close([each["exp_avg"] for each in again.state.values()], [each["exp_avg"] for each in optimizers[1].state.values()], tolerance=1e-6)


def shared_inputs_are_summed_once(world):
    """Queries, keys and values take one value, whose gradient is summed once."""
    model, count = divided(seeded(lambda: Gpt(Grouped, Gated, layers=1))), []
    team = model.head._shoal.team
    plain = team.sum
    team.sum = lambda tensor: count.append(tuple(tensor.shape)) or plain(tensor)
    inputs, following = batch_of(0)
    loss_of(model(inputs), following).backward()
    sums = [each for each in count if len(each) == 3]
    expect(len(sums) == 3, "head, feed and attention, once each:", count)


def plans_may_be_given(world):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    one = seeded(lambda: Gpt(ByHead, Feed))
    plan = {"blocks.*.attention.query_key_value": "colwise", "blocks.*.attention.dense": "rowwise", "blocks.*.feed.0": ColwiseParallel(),
            "blocks.*.feed.3": RowwiseParallel(), "tokens": "rowwise", "head": "replicate"}
    model = divided(copy.deepcopy(one), plan=plan)
    expect(model.blocks[1].attention._modules["dense"].weight.shape[1] == WIDTH // world.size, "dense is whole")
    trains_like_one(one, model, runner(model))
    own = copy.deepcopy(one)
    own._tp_plan = {"blocks.*.attention.query_key_value": "colwise", "blocks.*.attention.dense": "rowwise", "blocks.*.norm_feed": "moe"}
    other = divided(copy.deepcopy(own), plan="hf")
    expect(other.blocks[0].feed[0].weight.shape[0] == 4 * WIDTH, "the automatic plan was used, too")
    both = divided(own)
    expect(both.blocks[0].feed[0].weight.shape[0] == 4 * WIDTH // world.size and both.blocks[0].attention.query_key_value._shoal.sections == 1,
           "both plans should be used")
    found = tools().plan_of(one, 2)
    expect(found["blocks.0.feed.0"] == "colwise" and found["blocks.0.attention.query_key_value"] == "qkv" and found["head"] ==
           "colwise_gather_output", found)
    tools()._choose(one, found, 2)


def chains_of_layers(world):
    """Layers whose roles follow from sizes alone."""
    class Four(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            return self.d(torch.tanh(self.a(x) * self.b(x)) + self.c(x))
    plan = tools().plan_of(Four(), 2)
    expect(plan == {"a": "colwise", "b": "colwise", "c": "colwise", "d": "rowwise"}, plan)
    plan = tools().plan_of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2)), 2)
    expect(plan == {"0": "colwise", "2": "rowwise"}, plan)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    model[1].weight = nn.Parameter(model[0].weight.detach().t().clone())
    model.add_module("2", nn.Linear(6, 8))
    model[2].weight = model[1].weight
    expect(tools().plan_of(model, 2) == {}, "tied layers are not divided by sizes")


def checkpoints_of_activations_and_bfloat16(world):
    """What is computed again in the backward pass is the same, with both forms of torch's checkpoints; and autocast holds."""
    from torch.utils.checkpoint import checkpoint

    class Again(Gpt):
        def __init__(self, reentrant):
            super().__init__(Grouped, Gated)
            self.reentrant = reentrant

        def forward(self, tokens):
            x = self.tokens(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return self.head(self.norm(x))
    for reentrant in (False, True):
        one = seeded(lambda: Again(reentrant))
        model = divided(copy.deepcopy(one))
        trains_like_one(one, model, runner(model), steps=2)
    inputs, following = batch_of(7)
    losses = []
    for each in (one, model):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_of(each(inputs), following).float())
    close(losses[:1], losses[1:], tolerance=0.03)
    losses[1].backward()
    expect(all(each.grad.dtype is torch.float32 for each in model.parameters() if each.grad is not None))


def dropout_is_the_same_in_whole_values(world):
    """Whole values stay equal on all ranks, and values in parts drop some elements."""
    class Drops(Block):
        def forward(self, x):
            x = x + functional.dropout(self.attention(self.norm_attention(x)), 0.2, self.training)
            return x + self.feed(self.norm_feed(x))
    model = nn.ModuleList(Drops(lambda: Torch(dropout=0.2), Feed) for _ in range(2))
    model[0].feed[2].p = 0.3
    divided(model)
    x = torch.randn(3, 5, WIDTH)
    dist.broadcast(x, 0)
    torch.manual_seed(4)
    found = model[1](model[0](x))
    every = [torch.empty_like(found) for _ in range(world.size)]
    dist.all_gather(every, found.detach())
    close(every[:1], every[1:], "whole values", 0)
    expect((found - model[1](model[0](x))).abs().max() > 0, "nothing was dropped")
    plain = model.eval()[0](x)
    close([plain], [model[0](x)], "an evaluation drops", 0)


# ---- What torch itself needs -----------------------------------------------------------------------------------------------


def dtensors_change_places(world):
    """The collectives by which DTensor changes the place of a tensor, of even and uneven sizes, for several types."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    mesh = mesh_of(world.size, names=("tensor",))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows, columns in ((4 * world.size, 2 * world.size), (world.size + 1, 3), (1, 5)):
            whole = torch.arange(rows * columns).view(rows, columns).to(dtype)
            places = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
            for begin in places.values():
                tensor = distribute_tensor(whole, mesh, [begin])
                for end in places.values():
                    close([tensor.redistribute(placements=[end]).full_tensor()], [whole], (dtype, begin, end), 0)
            for end in places.values():
                part = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
                close([part.redistribute(placements=[end]).full_tensor()], [whole * world.size], (dtype, "sum", end), 0)


def torchs_own_parallelism_runs(world):
    """parallelize_module() with DTensor parameters over the back-end: columns, rows and sequences."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    one = seeded(lambda: nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)}))
    model = parallelize_module(copy.deepcopy(one), mesh_of(world.size, names=("tensor",)), {
        "norm": SequenceParallel(sequence_dim=1), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))})
    x = torch.randn(2, 4 * world.size, WIDTH)
    dist.broadcast(x, 0)

    def run(each, x):
        return each["down"](functional.gelu(each["up"](each["norm"](x))))
    wanted, found = run(one, x), run(model, x.chunk(world.size, 1)[world.rank])
    close([found], [wanted.chunk(world.size, 1)[world.rank]])
    wanted.square().sum().backward()
    found.square().sum().backward()
    for own, whole in zip(model.parameters(), one.parameters()):
        close([own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad], [whole.grad], tolerance=1e-3)


# ---- With data parallelism, shards and pipelines ---------------------------------------------------------------------------


def mesh_of(*sizes, names=("data", "pipeline", "tensor")):
    from torch.distributed.device_mesh import init_device_mesh
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes):])


def data_and_tensor(world):
    import shoal.torch
    mesh = mesh_of(2, world.size // 2, names=("data", "tensor"))
    one = seeded(lambda: Gpt(Chunked, tied=True))
    model = divided(copy.deepcopy(one), mesh["tensor"])
    wrapped = shoal.torch.DistributedDataParallel(model, process_group=mesh.get_group("data"))
    optimizer = sgd(model)

    def run(step):
        inputs, following = (each.chunk(2)[mesh.get_local_rank("data")] for each in batch_of(step))
        optimizer.zero_grad()
        loss = loss_of(wrapped(inputs), following)
        loss.backward()
        norm = tools().clip_grad_norm_(model, 0.5)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("data"))
        return total / 2, norm
    trains_like_one(one, model, run)


def shards_and_tensor(world):
    """Parameters in parts are sharded among the ranks that have the same part."""
    import shoal.torch
    mesh = mesh_of(2, world.size // 2, names=("data", "tensor"))
    one = seeded(lambda: Gpt(Grouped, Gated))
    model = divided(copy.deepcopy(one), mesh["tensor"])
    optimizer = sgd(model)
    fails(lambda: shoal.torch.ShardedDataParallel(model, optimizer, max_norm=1.0, process_group=mesh.get_group("data")),
          NotImplementedError, "max_norm", "tensor parallelism")
    wrapped = shoal.torch.ShardedDataParallel(model, optimizer, process_group=mesh.get_group("data"))
    other = sgd(one)
    for step in range(3):
        inputs, following = batch_of(step)
        other.zero_grad()
        expected = loss_of(one(inputs), following)
        expected.backward()
        other.step()
        inputs, following = (each.chunk(2)[mesh.get_local_rank("data")] for each in (inputs, following))
        optimizer.zero_grad()
        loss = loss_of(wrapped(inputs), following)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("data"))
        close([total / 2], [expected], step)


def fsdp_and_tensor(world):
    """torch's FSDP2 shards parts among the ranks that have the same part."""
    from torch.distributed.fsdp import fully_shard
    mesh = mesh_of(2, world.size // 2, names=("data", "tensor"))
    one = seeded(lambda: Gpt(Viewed, Gated))
    model = divided(copy.deepcopy(one), mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizers = [sgd(each) for each in (one, model)]
    for step in range(3):
        losses = []
        for each, optimizer, batch in zip((one, model), optimizers, (batch_of(step), [
                half.chunk(2)[mesh.get_local_rank("data")] for half in batch_of(step)])):
            optimizer.zero_grad()
            losses.append(loss_of(each(batch[0]), batch[1]))
            losses[-1].backward()
            optimizer.step()
        total = losses[1].detach().clone()
        dist.all_reduce(total, group=mesh.get_group("data"))
        close([total / 2], losses[:1], step)


def pipeline_and_tensor(world):
    """Two stages of two ranks each, and of twice as many with replicas."""
    import shoal.torch
    replicas = world.size // 4
    mesh = mesh_of(replicas, 2, 2)
    tensor_rank = mesh.get_local_rank("tensor")
    for options in ({"cuts": ["blocks.1"]}, {}):
        one = seeded(lambda: Gpt(Viewed, Gated, layers=3, tied=True))
        model = divided(copy.deepcopy(one), mesh["tensor"])
        pipeline = shoal.torch.Pipeline(model, batch_of(0, 2)[0], microbatches=2, loss=loss_of, process_group=mesh.get_group("pipeline"),
                                        replicas=mesh.get_group("data") if replicas > 1 else None, **options)
        optimizer = sgd(pipeline)
        other = sgd(one)
        for step in range(2):
            inputs, following = batch_of(step, 4 * replicas)
            other.zero_grad()
            expected = loss_of(one(inputs), following)
            expected.backward()
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            other.step()
            own = [each.chunk(replicas)[mesh.get_local_rank("data")] for each in (inputs, following)]
            optimizer.zero_grad()
            loss = pipeline.step(*own)
            own_norm = pipeline.clip_grad_norm_(0.5)
            optimizer.step()
            dist.all_reduce(loss, group=mesh.get_group("data"))
            close([loss / replicas], [expected], ("loss", step, options))
            close([own_norm], [norm], ("norm", step, options), 1e-4)
        state = tools().full_state_dict(pipeline.module, to=None)
        wanted = one.state_dict()
        close([state[name] for name in state], [wanted[name] for name in state], ("state", options), 2e-4)
        result = pipeline.forward(batch_of(5, 4)[0])
        if result is not None:
            close([result], [one(batch_of(5, 4)[0])], ("result", options, tensor_rank), 2e-4)


def cuts_may_be_anywhere(world):
    """Between the two layers of a pair, so that a stage sends its part of a value to the rank with the same part."""
    import shoal.torch
    mesh = mesh_of(2, 2, names=("pipeline", "tensor"))

    class Open(nn.Module):
        """Like attention, with all layers as units."""

        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.feed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Feed()

        def forward(self, x):
            q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
            return self.feed(self.out(attend(q, k, v).transpose(1, 2).flatten(2)))
    for cut in ("out", "feed.1", "feed.3"):
        one = seeded(Open)
        model = divided(copy.deepcopy(one), mesh["tensor"])
        pipeline = shoal.torch.Pipeline(model, torch.zeros(2, 5, WIDTH), microbatches=2, loss=functional.mse_loss, cuts=[cut],
                                        process_group=mesh.get_group("pipeline"))
        torch.manual_seed(3)
        x, y = torch.randn(2, 4, 5, WIDTH).unbind()
        expected = functional.mse_loss(one(x), y)
        expected.backward()
        close([pipeline.step(x, y)], [expected], cut)
        parts, wanted = tools()._named_parts(pipeline.module), dict(one.named_parameters())
        for name, own in pipeline.named_parameters():
            close([parts[name].whole(own.grad) if name in parts else own.grad], [wanted[name].grad], (cut, name))


# ---- Bad input -------------------------------------------------------------------------------------------------------------


def wrong_arguments_are_refused(world):
    model = seeded(Gpt)
    fails(lambda: divided([1]), TypeError, "model must be an nn.Module, not list")
    fails(lambda: divided(model, 0), TypeError, "from 1 on", "0")
    fails(lambda: divided(model, "tensor"), TypeError, "'tensor'")
    fails(lambda: divided(model, world.size + 1), ValueError, f"{world.size + 1} ranks", f"the {world.size} ranks of the job")
    fails(lambda: divided(model, mesh_of(1, world.size, names=("data", "tensor"))), ValueError, "2 dimensions", "mesh[\"tensor\"]")
    fails(lambda: divided(model, plan="automatic"), TypeError, "'automatic'")
    fails(lambda: divided(model, plan="hf"), ValueError, "Gpt", "_tp_plan")
    fails(lambda: divided(model, plan={"blocks.*.feeds.0": "colwise"}), ValueError, "'blocks.*.feeds.0'", "did you mean")
    fails(lambda: divided(model, plan={"head": "columns"}), ValueError, "head", "'columns'", "colwise")
    fails(lambda: divided(model, plan={"norm": "colwise"}), TypeError, "norm", "LayerNorm")
    fails(lambda: divided(model, plan={"tokens": "colwise"}), TypeError, "tokens", "Embedding", "\"rowwise\"")
    from torch.distributed.tensor.parallel import SequenceParallel
    fails(lambda: divided(model, plan={"norm": SequenceParallel()}), NotImplementedError, "SequenceParallel", "parallelize_module()")
    fails(lambda: tools().full_state_dict(model), RuntimeError, "not divided")
    divided(model)
    fails(lambda: divided(model), RuntimeError, "divided already")


def sizes_that_do_not_fit_are_refused(world):
    def attention(heads):
        def make():
            made = Viewed()
            made.heads = heads
            return made
        return make
    fails(lambda: divided(seeded(lambda: Gpt(attention(3)))), ValueError, "blocks.0.attention", "3 heads (heads)", "2, does not divide")
    fails(lambda: divided(nn.ModuleList([nn.MultiheadAttention(9, 3)])), ValueError, "0 has 3 heads", "2, does not divide")
    fails(lambda: divided(nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))), ValueError, "0 has 7 features", "2, does not divide")
    fails(lambda: divided(seeded(lambda: Gpt(words=33)), plan={"tokens": "rowwise"}), ValueError, "tokens has 33 rows", "2, does not divide")
    fails(lambda: divided(nn.Sequential(nn.Linear(4, 8)), plan={"0": "qkv"}), ValueError, "8 features", "3 sections")
    fails(lambda: divided(seeded(lambda: Gpt(tied=True)), plan={"head": "colwise_gather_output"}), ValueError, "same weight", "one of them only")


def ranks_that_differ_are_refused(world):
    layers = 1 + (world.rank == 1)
    fails(lambda: divided(seeded(lambda: Gpt(layers=layers))), ValueError, "1 of the 2 ranks", "another model")


def what_stays_whole_is_said(world):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.disable(logging.NOTSET)
    logging.getLogger("shoal.torch").addHandler(handler)
    try:
        divided(seeded(lambda: Gpt(words=33)))
        divided(nn.ModuleDict({"norm": nn.LayerNorm(4)}))
    finally:
        logging.getLogger("shoal.torch").removeHandler(handler)
        logging.disable(logging.WARNING)
    if world.rank == 0:
        expect(len(told) == 2 and "tokens (2 ranks do not divide 33 rows)" in told[0] and "head" in told[0], told)
        expect("divides no module of ModuleDict" in told[1], told)
    else:
        expect(not told, told)


def a_rank_that_dies_is_named(world):
    import shoal.torch._communicator as communicator
    model = divided(seeded(Gpt))
    inputs, following = batch_of(0)
    loss_of(model(inputs), following).backward()
    if world.rank == 1:
        os._exit(7)
    try:
        for _ in range(3):
            loss_of(model(inputs), following).backward()
    except communicator.BackendError as error:
        expect("rank 1" in str(error) and "exited with code 7" in str(error), str(error))
        return
    expect(False, "no error")


def copies_are_divided_and_pickles_refused(world):
    import pickle
    model = divided(seeded(Gpt))
    other = copy.deepcopy(model)
    inputs, _ = batch_of(0)
    close([model(inputs)], [other(inputs)], tolerance=0)
    fails_plain(lambda: pickle.dumps(model), Exception, "")


CASES = [
    *(model_case(name) for name in MODELS),
    Case("ranks have parts", ranks_have_parts, (2, 4)),
    Case("degrees agree", degrees_agree, (1, 4)),
    Case("transformers of torch", transformers_of_torch, (2,)),
    Case("attention forms", attention_forms, (2,)),
    Case("meta models get values", meta_models_get_values, (2,)),
    Case("values are the first rank's", values_are_the_first_ranks, (2,)),
    Case("states are whole", states_are_whole, (2,)),
    Case("shared inputs are summed once", shared_inputs_are_summed_once, (2,)),
    Case("plans may be given", plans_may_be_given, (2,)),
    Case("chains of layers", chains_of_layers, (1,)),
    Case("checkpoints of activations, and bfloat16", checkpoints_of_activations_and_bfloat16, (2,)),
    Case("dropout is the same in whole values", dropout_is_the_same_in_whole_values, (2,)),
    Case("DTensors change places", dtensors_change_places, (1, 2, 3)),
    Case("torch's own parallelism runs", torchs_own_parallelism_runs, (2,)),
    Case("data and tensor", data_and_tensor, (4,)),
    Case("FSDP2 and tensor", fsdp_and_tensor, (4,)),
    Case("shards and tensor", shards_and_tensor, (4,)),
    Case("pipeline and tensor", pipeline_and_tensor, (4, 8)),
    Case("cuts may be anywhere", cuts_may_be_anywhere, (4,)),
    Case("wrong arguments are refused", wrong_arguments_are_refused, (2,)),
    Case("sizes that do not fit are refused", sizes_that_do_not_fit_are_refused, (2,)),
    Case("ranks that differ are refused", ranks_that_differ_are_refused, (2,)),
    Case("what stays whole is said", what_stays_whole_is_said, (2,)),
    Case("a rank that dies is named", a_rank_that_dies_is_named, (2,), fresh=True, ends=(1,)),
    Case("copies are divided, and pickles refused", copies_are_divided_and_pickles_refused, (2,)),
]

if __name__ == "__main__":
    ranks.run(CASES)
