"""Pages of the Python packages: each public module with its functions and classes. They are made from the sources, because
importing the modules would need PyTorch and TensorFlow. A name that a package re-exports from one of its modules is shown
where users import it."""
import ast
import pathlib
import re

import rest

SAGEMAKER = "smdistributed.modelparallel.v2.sagemaker"
# Page -> (title, modules in a reader's order). Names that a package re-exports are shown with it.
PAGES = {
    "torch": ("shoal.torch", ["shoal.torch", "shoal.torch.ddp", "shoal.torch.sharded", "shoal.torch.pipeline", "shoal.torch.tensor",
                              "shoal.torch.outer", "shoal.torch.sampler", "shoal.torch.norm", "shoal.torch.scheduler",
                              "shoal.torch.profiles", "shoal.torch.hooks", "shoal.torch.torchft", "shoal.torch.keras",
                              "shoal.torch.keras.callbacks"]),
    "tensorflow": ("shoal.tensorflow", ["shoal.tensorflow", "shoal.tensorflow.data", "shoal.tensorflow.keras",
                                        "shoal.tensorflow.keras.callbacks", "shoal.tensorflow.distribute",
                                        "shoal.tensorflow.profiles"]),
    "horovod": ("shoal.horovod", ["shoal.horovod.torch", "shoal.horovod.torch.elastic",
                                  "shoal.horovod.torch.compression", "shoal.horovod.tensorflow",
                                  "shoal.horovod.tensorflow.compression",
                                  "shoal.horovod.tensorflow.elastic", "shoal.horovod.tensorflow.keras",
                                  "shoal.horovod.tensorflow.keras.callbacks", "shoal.horovod.tensorflow.keras.elastic",
                                  "shoal.horovod.keras"]),
    "job": ("shoal.job", ["shoal.job"]),
    "smdistributed": ("smdistributed", ["smdistributed.dataparallel.torch.distributed",
                                        "smdistributed.dataparallel.torch.parallel.distributed",
                                        "smdistributed.dataparallel.tensorflow", "smdistributed.dataparallel.tensorflow.keras",
                                        "smdistributed.dataparallel.exceptions", "smdistributed.modelparallel.torch",
                                        "smdistributed.modelparallel.torch.nn",
                                        "smdistributed.modelparallel.torch.nn.huggingface.gpt2",
                                        "smdistributed.modelparallel.torch.nn.huggingface.gptj",
                                        "smdistributed.modelparallel.torch.amp", "smdistributed.modelparallel.torch.optimizers",
                                        "smdistributed.modelparallel.torch.utils", "smdistributed.modelparallel.tensorflow",
                                        "smdistributed.modelparallel.exceptions"]),
    # `torch.sagemaker` in a program (docs/torch-sagemaker.md).
    "torch_sagemaker": ("torch.sagemaker", [f"{SAGEMAKER}{name}" for name in (
        "", ".state_handler", ".delayed_param", ".grad_norm", ".tensor_parallel.transformer", ".nn.attn",
        ".nn.huggingface.llama_flashattn", ".moe.moe_config", ".moe.moe_layer", ".distributed.checkpoint.state_dict_saver",
        ".distributed.checkpoint.state_dict_loader", ".distributed.checkpoint.state_dict_utils",
        ".distributed.checkpoint.filesystem", ".distributed.checkpoint.async_utils", ".checkpoint.utils",
        ".utils.module_utils", ".utils.process_group_utils", ".utils.utils", ".logger")]),
    "shoal": ("shoal", ["shoal", "shoal.checkpoint"]),
}

# Without an underscore, but no program imports them.
HELPERS = {"shoal.tensorflow.variables.assign_broadcasts", "shoal.tensorflow.variables.gather_objects",
           "shoal.tensorflow.variables.share_object", "smdistributed.modelparallel.extend_torch"}


class Sources:
    """Modules below folders, parsed when first needed."""

    def __init__(self, *folders):
        self.folders, self.trees = folders, {}

    def tree(self, module):
        """Returns the parsed module, or None if it does not exist."""
        if module not in self.trees:
            paths = [folder / (module.replace(".", "/") + end) for folder in self.folders for end in ("/__init__.py", ".py")]
            path = next((path for path in paths if path.exists()), None)
            self.trees[module] = path and (ast.parse(path.read_text()), path.name == "__init__.py")
        return self.trees[module]

    def public(self, module):
        """Returns (name, node) of the module's public names, in its order."""
        tree, _ = self.tree(module)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                yield node.name, node
            elif isinstance(node, ast.ImportFrom):
                yield from self._taken(module, node)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":  # imported when first used
                for own, names in ast.literal_eval(node.value).items():
                    yield from ((name, self._find(f"{module}.{own}", name)) for name in names)

    def _taken(self, module, node):
        source = self._source(module, node)
        if not source or not self.tree(source):
            return
        for alias in node.names:
            found = None if (alias.asname or alias.name).startswith("_") else self._find(source, alias.name)
            if found:
                yield alias.asname or alias.name, found

    def _source(self, module, node):
        """Returns the module of the same package from which names are imported."""
        is_package = self.tree(module)[1]
        if not node.module or not is_package or node.module == module:  # imports a module, not a name from one
            return None
        base = module.split(".")
        if node.level:
            return ".".join([*base[:len(base) - node.level + 1], node.module])
        named = re.sub(r"^torch\.sagemaker\b", SAGEMAKER, node.module)  # as this package is imported
        return named if named.split(".")[0] == base[0] else None

    def _find(self, module, name):
        """Returns the function or class of that name. Follows imports through other modules."""
        if not self.tree(module):
            return None
        for node in self.tree(module)[0].body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                source = self._source(module, node)
                return source and self._find(source, next(alias.name for alias in node.names if (alias.asname or alias.name) == name))
        return None


def docstring_text(node):
    """Converts a docstring. Docstrings are plain text, like comments of the headers: code between backticks, and code
    indented by four."""
    out, own = [], " " * (node.body[0].col_offset if node.body else 0)
    for line in (ast.get_docstring(node, clean=False) or "").rstrip().splitlines():
        line = line.removeprefix(own)
        if line.startswith("    ") and (not out or not out[-1]):
            out += [".. code-block:: python", ""]
        out.append(line if line.startswith("    ") else text_of(line))
    return out


def text_of(line):
    """Returns a line of plain text in Sphinx's markup, which gives a meaning to *name and to name_."""
    line = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
    return re.sub(r"(?<=\w)_(?![\w`])", r"\\_", re.sub(r"(?<![`\w])\*(?=\w)", r"\\*", line))


def signature(node):
    if isinstance(node, ast.FunctionDef):
        return ast.unparse(node.args)
    made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if made:
        return re.sub(r"^self(, )?", "", ast.unparse(made.args))
    fields = node.body if "dataclass" in "".join(map(ast.unparse, node.decorator_list)) else []
    return ", ".join(field_text(field) for field in fields if isinstance(field, ast.AnnAssign))


def field_text(field):
    """Returns a field of a dataclass as its constructor has it. For a factory, shows the factory's name."""
    value = ast.unparse(field.value) if field.value else ""
    factory = re.search(r"default_factory=([\w.]+)", value)
    return f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}" + (f" = {factory[1] + '()' if factory else value}" if value else "")


def entry(kind, name, node, indent=""):
    words = re.sub("^(self|cls)(, )?", "", signature(node)) if kind == "method" else signature(node)
    lines = [f".. py:{kind}:: {name}({words})", *(["   :no-index-entry:"] if kind == "method" else []), "", *rest.indented(docstring_text(node)), ""]
    if kind == "class":
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
                lines += entry("method", method.name, method, "   ")
    return [indent + line if line else "" for line in lines]


def pages_of(top):
    """Returns the text of each page by its name."""
    sources, made = Sources(top / "python"), {}
    for page, (title, modules) in PAGES.items():
        out = rest.heading(title, "=")
        for module in modules:
            tree, _ = sources.tree(module)
            out += rest.heading(module, "-") if module != title else []
            out += [f".. py:currentmodule:: {module}", "", *docstring_text(tree), ""]
            seen = set()
            for name, node in sources.public(module):
                if node is not None and name not in seen:
                    seen.add(name)
                    out += entry("class" if isinstance(node, ast.ClassDef) else "function", name, node)
        made[f"python/{page}"] = "\n".join(out)
    return made


def left_out(top):
    """Returns the public functions and classes that are on no page, as MODULE.NAME, except HELPERS. Those of shoal.job are in
    its one list."""
    sources = Sources(top / "python")
    shown = {id(node) for _, modules in PAGES.values() for module in modules for _, node in sources.public(module)}
    missing = []
    for path in sorted((top / "python").rglob("*.py")):
        parts = path.relative_to(top / "python").with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if len(parts) < 2 or module.startswith("shoal.job") or any(part.startswith("_") for part in module.split(".")):
            continue
        missing += [f"{module}.{name}" for name, node in sources.public(module) if node is not None and id(node) not in shown]
    return sorted(set(missing) - HELPERS)
