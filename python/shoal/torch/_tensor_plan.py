"""Which modules of a model are divided among the ranks of a tensor-parallel group, and how.

A linear layer in columns is followed by one in rows, so that one sum ends both. The automatic plan finds such groups by sizes, in
the order in which modules were made:

    fc1 E -> F, fc2 F -> E                   fc1 in columns, fc2 in rows
    gate E -> F, up E -> F, down F -> E      gate and up in columns, down in rows
    q, k, v E -> E, out E -> E               q, k and v in columns, out in rows; they are known by their names
    qkv E -> 3 E, out E -> E                 qkv in three sections of columns, out in rows

A wrong guess costs time, not the result: values between divided modules have the shape of the whole (_tensor_parts.py)."""
from __future__ import annotations

import difflib
import re
import typing

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ._tensor_layers import Columns, Heads, Rows, Words


class Choice(typing.NamedTuple):
    """How a module is divided."""
    kind: type
    output: str = "parts"
    sections: int = 1


COLUMNS, ROWS, WORDS, HEADS, GATHERED = Choice(Columns), Choice(Rows), Choice(Words), Choice(Heads), Choice(Columns, "whole")
# The styles of a plan: words of transformers' plans, and "qkv" for queries, keys and values one after the other.
STYLES = {"colwise": COLUMNS, "colwise_rep": GATHERED, "colwise_gather_output": GATHERED, "rowwise": ROWS, "rowwise_split_input": ROWS,
          "packed_colwise": Choice(Columns, "sections", 2), "qkv": Choice(Columns, "sections", 3), "embedding_rowwise": WORDS, "heads": HEADS,
          "replicate": None, "replicated_with_grad_allreduce": None}
_WORDS = {COLUMNS: "colwise", GATHERED: "colwise_gather_output", ROWS: "rowwise", WORDS: "embedding_rowwise", HEADS: "heads",
          STYLES["packed_colwise"]: "packed_colwise", STYLES["qkv"]: "qkv"}
# Attributes by which modules know how many heads they have.
HEAD_COUNTS = ("heads", "n_head", "n_heads", "num_heads", "nhead", "num_attention_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads")
_QUERIES = re.compile(r"(^|_)(q|k|v|query|key|value|to_?q|to_?k|to_?v|w_?q|w_?k|w_?v|keys|queries|values)(_|$)")


class Linear(typing.NamedTuple):
    """A linear layer that may be divided. block: the name of the member of a list that has it, or "" outside of lists."""
    name: str
    module: nn.Module
    block: str
    inputs: int
    outputs: int

    @property
    def parent(self):
        return self.name.rpartition(".")[0]

    @property
    def is_query(self):
        """Returns true if its name is that of queries, keys or values, and of one of them only."""
        last = self.name.rpartition(".")[2].lower()
        return len(_QUERIES.findall(last)) == 1 and not ("query" in last and "key" in last)


def is_conv1d(module):
    """Returns true for the linear layer of transformers whose weight has its input features first."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None and module.weight.dim() == 2


def is_linear(module):
    return type(module) is nn.Linear or is_conv1d(module)


def sizes_of(module):
    """Returns the numbers of input and output features of a linear layer."""
    return tuple(module.weight.shape) if is_conv1d(module) else (module.in_features, module.out_features)


# ---- The automatic plan ----------------------------------------------------------------------------------------------------


class Automatic:
    """The plan of a model by the sizes of its modules. choices: by names. whole: why modules stay whole, by names."""

    def __init__(self, model, size, within=None):
        """within: a function that returns true for the names of modules that may be divided."""
        self._model, self._size, self.choices, self.whole = model, size, {}, {}
        self._within = within or (lambda name: True)
        self._modules = dict(model.named_modules())
        self._users = _users_of(model)
        linears = self._linears()
        for block in dict.fromkeys(each.block for each in linears):
            self._pair([each for each in linears if each.block == block])
        self._choose_embeddings(linears)
        for each in linears:
            if each.name not in self.choices:
                self.whole.setdefault(each.name, "no layer before or after it makes a pair with it")

    def _linears(self):
        """Returns the linear layers in their order; attention modules are chosen at once."""
        found, blocks = [], {}
        for name, module in self._modules.items():
            parent = name.rpartition(".")[0]
            owner = self._modules.get(parent)
            blocks[name] = name if name and isinstance(owner, nn.ModuleList) else blocks.get(parent, "")
            if isinstance(owner, nn.MultiheadAttention) or not self._within(name):
                continue
            if type(module) is nn.MultiheadAttention:
                self._choose_attention(name, module)
            elif is_linear(module):
                found.append(Linear(name, module, blocks[name], *sizes_of(module)))
        return found

    def _choose_attention(self, name, module):
        if module.bias_k is not None or module.add_zero_attn:
            self.whole[name] = "add_bias_kv and add_zero_attn are not divided"
            return
        self.choices[name] = HEADS

    def _pair(self, linears):
        pending = []
        for number, each in enumerate(linears):
            if self._is_tied(each.name):
                pending = []
                continue
            sections = self._sections(pending, each, linears[number:])
            if sections:
                self._choose_group(pending, each, sections)
                pending = []
            elif pending and each.inputs == pending[0].inputs and each.is_query == pending[0].is_query:
                pending.append(each)
            else:
                pending = [each]

    def _sections(self, pending, each, following):
        """Returns how many sections the columns of the pending layers have if `each` takes their result, or 0."""
        if not pending or each.is_query:
            return 0
        first = pending[0]
        if each.outputs != first.inputs and each.parent != first.parent:
            return 0
        if each.inputs == first.outputs:
            is_one_of_four = not first.is_query and each.inputs == each.outputs and len(pending) < 3 and \
                self._row_of_squares(pending, following) == 4
            return 0 if is_one_of_four else 1
        is_fused = len(pending) == 1 and each.outputs == first.inputs
        return next((sections for sections in (3, 2) if is_fused and first.outputs == sections * each.inputs), 0)

    @staticmethod
    def _row_of_squares(pending, following):
        """Returns how many layers in a row are of the same module and size: four are taken for queries, keys, values and result."""
        first, count = pending[0], len(pending)
        for each in following:
            if each.parent != first.parent or (each.inputs, each.outputs) != (first.inputs, first.inputs):
                break
            count += 1
        return count

    def _choose_group(self, columns, row, sections):
        choice = COLUMNS if sections == 1 else Choice(Columns, "sections", sections)
        self.choices.update({each.name: choice for each in columns})
        self.choices[row.name] = ROWS

    def _is_tied(self, name):
        return any(len(self._users[id(each)]) > 1 for each in self._modules[name].parameters())

    def _choose_embeddings(self, linears):
        """Divides embeddings that have no fewer rows than columns, and linear layers that return a score for each of these rows."""
        for name, module in self._modules.items():
            if type(module) is not nn.Embedding or module.num_embeddings < module.embedding_dim or not self._within(name):
                continue
            reason = _why_whole(module, self._size)
            heads = [each for each in linears if each.name not in self.choices and
                     (each.inputs, each.outputs) == (module.embedding_dim, module.num_embeddings) and not is_conv1d(each.module)]
            owners = {name, *(each.name for each in heads)}
            parameters = [parameter for owner in owners for parameter in self._modules[owner].parameters()]
            if {owner for parameter in parameters for owner, _ in self._users[id(parameter)]} - owners:
                reason = "its parameters are those of other modules, too"
            if reason:
                self.whole.update({each: reason for each in (name, *(each.name for each in heads))})
            else:
                self.choices.update({name: WORDS, **{each.name: GATHERED for each in heads}})


def _why_whole(embedding, size):
    if embedding.num_embeddings % size:
        return f"{size} ranks do not divide {embedding.num_embeddings} rows"
    if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
        return "max_norm, sparse and scale_grad_by_freq are not divided"
    return None


def _users_of(model):
    """Returns by the id of each parameter the pairs (name of the module, name of the parameter in it)."""
    found = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((name, key))
    return found


def merged(chosen, automatic):
    """Returns a plan that a model brings, and of the automatic one what it does not touch: groups of linear layers none of which it
    has, and the rest of the model."""
    parents = {name.rpartition(".")[0] for name in chosen}
    more = {name: choice for name, choice in automatic.items() if not name.rpartition(".")[0] in parents - {""}}
    return {**more, **chosen}


def words_of(choices):
    """Returns the plan in words that makes these choices."""
    return {name: _WORDS[choice] for name, choice in choices.items()}


# ---- Plans by names --------------------------------------------------------------------------------------------------------


def own_plan_of(model):
    """Returns the plan that a model of transformers brings, or {}."""
    return dict(getattr(model, "_tp_plan", None) or {})


def named(model, plan, is_strict=True):
    """Returns (choices, why other modules stay whole) for a plan: styles by names of modules, in which * is any one part of a name.
    A module that cannot be divided is an error, or, if not is_strict, stays whole."""
    modules, choices, whole = dict(model.named_modules()), {}, {}
    for pattern, style in plan.items():
        expression = re.compile("[^.]+".join(re.escape(each) for each in pattern.split("*")))
        names = [name for name in modules if expression.fullmatch(name)]
        if not names and is_strict:
            near = difflib.get_close_matches(pattern, modules, n=1)
            raise ValueError(f"shoal: the plan has {pattern!r}, and the model has no such module" + (f": did you mean {near[0]!r}?" if near else ""))
        for name in names:
            if is_strict or style in STYLES:
                choices[name] = _choice(name, modules[name], style)
            else:
                whole[name] = f"the style {style} of its plan is not served"
    return {name: choice for name, choice in choices.items() if choice is not None}, whole


def _choice(name, module, style):
    if isinstance(style, ParallelStyle):
        style = _style_of(name, style)
    if style not in STYLES:
        raise ValueError(f"shoal: the plan divides {name} by {style!r}, but knows {', '.join(STYLES)}")
    choice = STYLES[style]
    if choice == ROWS and type(module) is nn.Embedding:
        return WORDS
    fits = {None: True, Columns: is_linear(module), Rows: is_linear(module), Words: type(module) is nn.Embedding,
            Heads: type(module) is nn.MultiheadAttention}[choice and choice.kind]
    if not fits:
        raise TypeError(f"shoal: the plan divides {name}, which is a {type(module).__name__}, by {style!r}: nn.Linear and Conv1D can be "
                        "divided by \"colwise\", \"rowwise\" and the like, nn.Embedding by \"rowwise\", nn.MultiheadAttention by \"heads\"")
    return choice


def _style_of(name, style):
    """Returns the word for a style of torch with torch's own layouts."""
    if type(style) is ColwiseParallel and style.input_layouts == (Replicate(),) and style.output_layouts in ((Shard(-1),), (Replicate(),)):
        return "colwise" if style.output_layouts == (Shard(-1),) else "colwise_gather_output"
    if type(style) is RowwiseParallel and style.output_layouts == (Replicate(),) and style.input_layouts in ((Shard(-1),), (Replicate(),)):
        return "rowwise"
    raise NotImplementedError(f"shoal: the plan divides {name} by {type(style).__name__}: of torch's styles ColwiseParallel and RowwiseParallel "
                              "with whole values around a pair are served; for others call torch's parallelize_module(), which works over "
                              "the back-end \"shoal\"")


# ---- Whether sizes fit -----------------------------------------------------------------------------------------------------


def check(model, choices, size):
    """Raises an error for the first module whose features or heads the ranks do not divide."""
    modules = dict(model.named_modules())
    for name, choice in choices.items():
        module = modules[name]
        if choice.kind is Heads:
            _check_size(name, module.num_heads, "heads", size)
        elif choice.kind is Words:
            _check_size(name, module.num_embeddings, "rows", size)
            reason = _why_whole(module, size)
            if reason:
                raise NotImplementedError(f"shoal: {name}: {reason}")
        else:
            inputs, outputs = sizes_of(module)
            _check_features(name, inputs if choice.kind is Rows else outputs, choice.sections, size)
    for parent in sorted({name.rpartition(".")[0] for name, choice in choices.items() if choice.kind is Columns and choice.output != "whole"}):
        _check_heads(parent, modules[parent], size)


def _check_heads(name, module, size):
    for key in HEAD_COUNTS:
        count = getattr(module, key, None)
        if count is None and any(hasattr(module, each) for each in ("head_dim", "scaling")):
            count = getattr(getattr(module, "config", None), key, None)
        if isinstance(count, int) and not isinstance(count, bool):
            _check_size(name, count, f"heads ({key})", size)


def _check_features(name, count, sections, size):
    if count % sections:
        raise ValueError(f"shoal: {name} has {count} features, which are not {sections} sections of equal size: divide it by another style")
    _check_size(name, count // sections, "features" if sections == 1 else f"features in each of {sections} sections", size)


def _check_size(name, count, what, size):
    if count % size:
        raise ValueError(f"shoal: {name or 'the model'} has {count} {what}, which the degree of tensor parallelism, {size}, does not divide: use "
                         "another degree, or a plan without it: shoal.torch.tensor.plan_of(model, 1) returns one to change")
