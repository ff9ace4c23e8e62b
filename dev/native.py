#!/usr/bin/env python3
"""Writes python/shoal/_native/_declarations.py, the public headers for ctypes, from the headers of include/shoal.

  dev/native.py            writes it
  dev/native.py --check    prints differences; exit code 1 if there are any (dev/check.py runs the same check)

The preprocessor expands the headers, and this program parses the result: enums, structs, typedefs of function pointers,
prototypes, numbers and *_INIT macros. Names lose their prefix: SHOAL_FLOAT32 becomes FLOAT32, struct shoal_comm_options
CommOptions, shoal_log_fn LogFn. A declaration of another form is an error that names its line."""
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

TOP = pathlib.Path(__file__).resolve().parent.parent
HEADERS = TOP / "include/shoal"
WRITTEN = TOP / "python/shoal/_native/_declarations.py"
SYSTEM_HEADERS = ("stddef.h", "stdint.h", "stdio.h", "stdbool.h")  # replaced by empty files: their types are known here
COLUMNS = 128

SCALARS = {
    "char": "c_char", "signed char": "c_byte", "unsigned char": "c_ubyte", "short": "c_short", "unsigned short": "c_ushort",
    "int": "c_int", "unsigned": "c_uint", "unsigned int": "c_uint", "long": "c_long", "unsigned long": "c_ulong",
    "long long": "c_longlong", "unsigned long long": "c_ulonglong", "float": "c_float", "double": "c_double", "bool": "c_bool",
    "_Bool": "c_bool", "size_t": "c_size_t", "ssize_t": "c_ssize_t", "uintptr_t": "c_size_t",
    **{f"{sign}int{bits}_t": f"c_{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
OPAQUE = {"void", "FILE"}  # Python does not see the target of a pointer to these
QUALIFIERS = {"const", "volatile", "restrict", "extern"}

Token = collections.namedtuple("Token", "text place")
Struct = collections.namedtuple("Struct", "name fields")  # fields: (name, Python expression of the type)


class Unreadable(Exception):
    pass


def refuse(token, reason):
    raise Unreadable(f"{token.place}: {reason} near \"{token.text}\": write it like the header's other declarations, or teach "
                     "dev/native.py this form")


# ---- From headers to tokens ----------------------------------------------------------------------------------------------


def preprocessed(text, folder, *options):
    """Preprocesses C text that includes headers of a folder."""
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)
    if not compiler:
        raise Unreadable("dev/native.py needs a C compiler (CC, cc, gcc, clang) to expand the headers' macros")
    with tempfile.TemporaryDirectory() as empty:
        for name in SYSTEM_HEADERS:
            pathlib.Path(empty, name).touch()
        command = [compiler, "-E", "-nostdinc", f"-I{folder.parent}", f"-isystem{empty}", *options, "-x", "c", "-"]
        result = subprocess.run(command, input=text, capture_output=True, text=True)
    if result.returncode:
        raise Unreadable(result.stderr.strip())
    return result.stdout


def tokens_of(text):
    """Returns the words of preprocessed C with their places, without attributes."""
    words, name, line = [], "", 0
    for row in text.splitlines():
        marker = re.match(r'# (\d+) "(.*?)"', row)
        if marker:
            name, line = pathlib.Path(marker[2]).name, int(marker[1])
            continue
        words += [Token(word, f"{name}:{line}") for word in re.findall(r'"(?:\\.|[^"])*"|[\w.]+|<<|>>|\S', row)]
        line += 1
    return without_attributes(words)


def without_attributes(words):
    kept, at = [], 0
    while at < len(words):
        if words[at].text == "__attribute__":
            at = closing(words, at + 1) + 1
        else:
            kept.append(words[at])
            at += 1
    return kept


def closing(words, at):
    """Returns the index of the bracket that closes the one at `at`."""
    depth = 0
    for index in range(at, len(words)):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(words[index].text, 0)
        if depth == 0:
            return index
    refuse(words[at], "a bracket is not closed")


def split(words, separator=","):
    """Returns the parts between separators outside brackets; an empty list for no words."""
    parts, depth = [[]], 0
    for word in words:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(word.text, 0)
        if word.text == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def statements(words):
    """Yields declarations without the semicolon at the end."""
    return split(words, ";")


def python_name(name):
    """Converts shoal_comm_options to CommOptions."""
    return "".join(part.capitalize() for part in name.removeprefix("shoal_").split("_"))


# ---- From tokens to declarations -----------------------------------------------------------------------------------------


class Declarations:
    """The declarations of headers, in their order. Types are Python expressions."""

    def __init__(self):
        self.constants = {}  # name in C: number; includes those of enums
        self.enums = {}  # name in C: {name in C: number}
        self.structs = {}  # name in C: Struct
        self.callbacks = {}  # name in C: its type in Python
        self.functions = {}  # name in C: (result, [argument])
        self.order = []  # (kind, name in C) of Python's definitions, in order
        self.begins = {}  # name of a struct: {field: value} from its *_INIT macro, without zeros

    def read(self, statement):
        first = statement[0]
        texts = [word.text for word in statement]
        if first.text == "enum" and "{" in texts:
            self.read_enum(statement)
        elif first.text == "struct" and "{" in texts:
            self.read_struct(statement)
        elif first.text == "typedef":
            self.read_callback(statement)
        elif first.text in ("struct", "enum") and len(statement) == 2:
            pass  # only its name: opaque, or defined later
        elif texts[-1] == ")":
            self.read_function(statement)
        else:
            refuse(first, "a declaration cannot be read")

    def read_enum(self, statement):
        if statement[2].text != "{" or statement[-1].text != "}":
            refuse(statement[0], "an enum without a name, or with something behind it,")
        members, following = {}, 0
        for part in split(statement[3:-1]):
            number = self.number(part[2:]) if len(part) > 1 else following
            members[part[0].text] = number
            following = number + 1
        self.enums[statement[1].text] = members
        self.constants.update(members)
        self.order.append(("enum", statement[1].text))

    def read_struct(self, statement):
        name = statement[1].text
        if statement[2].text != "{" or statement[-1].text != "}":
            refuse(statement[0], "a struct without a name, or with something behind it,")
        fields = [self.field(name, part) for line in statements(statement[3:-1]) for part in self.declarators(line)]
        self.structs[name] = Struct(name, fields)
        self.order.append(("struct", name))

    @staticmethod
    def declarators(words):
        """Returns the fields of `TYPE a, b` as those of `TYPE a` and `TYPE b`."""
        first, *others = split(words)
        if others and (first[-1].text == "]" or any(word.text == "*" for word in words)):
            refuse(words[0], "an array or a pointer among several fields of one line")
        return [first, *(first[:-1] + other for other in others)]

    def field(self, struct, words):
        """Returns (name, type) of a field. A type of function pointer becomes another definition, named after struct and
        field."""
        callback = self.callback(words)
        if callback:
            own = f"{struct}_{callback[0]}"
            self.callbacks[own] = callback[1]
            self.order.append(("callback", own))
            return callback[0], python_name(own)
        if any(word.text == ":" for word in words):
            refuse(words[0], "a bit-field")
        length = None
        if words[-1].text == "]":
            at = next(i for i, word in enumerate(words) if word.text == "[")
            length, words = self.number(words[at + 1:-1]), words[:at]
        own = self.type(words[:-1])
        return words[-1].text, f"{own} * {length}" if length is not None else own

    def read_callback(self, statement):
        callback = self.callback(statement[1:])
        if not callback:
            refuse(statement[0], "a typedef of something else than a function pointer")
        self.callbacks[callback[0]] = callback[1]
        self.order.append(("callback", callback[0]))

    def callback(self, words):
        """Returns (name, type) of `RESULT (*NAME)(ARGUMENTS)`, or None if the words have another form."""
        at = next((i for i, word in enumerate(words) if word.text == "("), None)
        if at is None or [word.text for word in words[at + 1:at + 2]] != ["*"] or words[at + 3].text != ")":
            return None
        types = [self.type(words[:at]), *map(self.of_callback, split(words[at + 5:-1]), self.arguments(words[at + 5:-1]))]
        return words[at + 2].text, f"CFUNCTYPE({', '.join(types)})"

    @staticmethod
    def of_callback(words, type_):
        """ctypes passes c_char_p to a callback as a copy, into which nothing can be written."""
        return "c_void_p" if type_ == "c_char_p" and words[0].text != "const" else type_

    def read_function(self, statement):
        at = next(i for i, word in enumerate(statement) if word.text == "(")
        name = statement[at - 1].text
        if not name.startswith("shoal_"):
            refuse(statement[at - 1], "a function without the prefix shoal_")
        self.functions[name] = (self.type(statement[:at - 1]), self.arguments(statement[at + 1:-1]))

    def arguments(self, words):
        if [word.text for word in words] == ["void"]:
            return []
        return [self.argument(part) for part in split(words)]

    def argument(self, words):
        if words[-1].text == "]" or any(word.text == "(" for word in words):
            refuse(words[0], "an argument that is an array or a bare function pointer (give its type a name)")
        if words[-1].text == "..." or words[0].text == ".":
            refuse(words[0], "a variable number of arguments")
        named = len(words) > 1 and words[-1].text != "*" and words[-2].text not in ("struct", "enum")
        is_type = words[-1].text in SCALARS or words[-1].text in OPAQUE
        return self.type(words[:-1] if named and not is_type else words)

    def type(self, words):
        """Returns the Python expression of a type."""
        base = " ".join(word.text for word in words if word.text != "*" and word.text not in QUALIFIERS)
        stars = sum(word.text == "*" for word in words)
        kind, _, name = base.partition(" ")
        if kind == "enum":
            own = "c_int" if name in self.enums else refuse(words[0], f"enum {name} before its definition")
        elif kind == "struct":
            own = python_name(name) if name in self.structs else None
        elif base in OPAQUE:
            own = None
        elif base in self.callbacks:
            own = python_name(base)
        else:
            own = SCALARS.get(base) or refuse(words[0], f"a type \"{base}\" that is not known")
        return self.pointer(words, base, own, stars)

    @staticmethod
    def pointer(words, base, own, stars):
        if own is None and stars == 0:
            return "None" if base == "void" else refuse(words[0], f"{base}, whose size is not known,")
        if stars and (own is None or base == "char"):
            own, stars = "c_void_p" if own is None else "c_char_p", stars - 1
        return "POINTER(" * stars + own + ")" * stars

    # ---- Numbers

    def number(self, words):
        """Returns the value of a constant expression."""
        texts = [str(self.constants.get(word.text, word.text)) for word in words]
        text = " ".join(re.sub(r"^(0[xX][0-9a-fA-F]+|\d+)[uUlL]+$", r"\1", one) for one in texts)
        if not re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+(\.\d*)?|[-+*()|&~ ]|<<|>>)+", text):
            refuse(words[0], f"no constant: {text}")
        return eval(text, {"__builtins__": {}})

    def read_init(self, words):
        """Reads `{ sizeof(struct X), 0, ... }`, the expansion of an *_INIT macro."""
        parts = split(words[1:-1])
        if words[0].text != "{" or [word.text for word in parts[0][:3]] != ["sizeof", "(", "struct"]:
            refuse(words[0], "an *_INIT macro that does not begin with sizeof(struct ...)")
        struct = self.structs[parts[0][3].text]
        values = [self.initial(part) for part in parts]
        self.begins[struct.name] = {name: value for (name, _), value in zip(struct.fields[1:], values[1:]) if value}

    def initial(self, words):
        text = words[0].text
        if text in ("sizeof", "NULL", '""'):
            return 0
        if text == "{":  # of a struct or an array
            values = tuple(map(self.initial, split(words[1:-1])))
            return values if any(values) else 0
        return self.number(words)


def read(folder):
    """Returns the declarations of all headers of a folder."""
    names = sorted(path.name for path in folder.glob("*.h"))
    text = "".join(f"#include <{folder.name}/{name}>\n" for name in names)
    macros = re.findall(r"^#define (SHOAL_\w+) +(\S.*)$", preprocessed(text, folder, "-dD"), re.M)
    inits = [name for name, _ in macros if name.endswith("_INIT")]
    marked = "".join(f"shoal_init {name};\n" for name in inits)
    declarations = Declarations()
    for statement in statements(tokens_of(preprocessed(text + marked, folder))):
        if statement[0].text == "shoal_init":
            declarations.read_init(statement[1:])
        else:
            declarations.read(statement)
    for name, value in macros:
        if re.fullmatch(r"\(?-?\d+\)?", value):
            declarations.constants[name] = int(value.strip("()"))
    return declarations


# ---- From declarations to Python -----------------------------------------------------------------------------------------

HEAD = '''"""The headers of include/shoal in ctypes. Written by dev/native.py: change the headers, not this file."""
from ctypes import CFUNCTYPE, POINTER, Structure
'''


def wrapped(begin, parts, end):
    """Returns begin + parts + end in lines of at most COLUMNS, with parts aligned. Never splits a part."""
    text = begin + ", ".join(part.replace(" ", "\0") for part in parts) + end
    lines = textwrap.wrap(text, COLUMNS, subsequent_indent=" " * len(begin), break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


def struct_text(declarations, struct):
    is_sized = struct.fields[0] == ("struct_bytes", "c_size_t")
    begins = declarations.begins.get(struct.name, {})
    head = wrapped("@begins(", [f"{name}={value}" for name, value in begins.items()], ")") if is_sized else ""
    fields = [f'("{name}", {type_})' for name, type_ in struct.fields]
    return (f"\n\n{head}class {python_name(struct.name)}({'Sized' if is_sized else 'Structure'}):\n"
            + wrapped("    _fields_ = [", fields, "]"))


def enum_text(declarations, name):
    return f"\n# enum {name}\n" + numbers_text(declarations.enums[name])


def numbers_text(numbers):
    return "".join(f"{name.removeprefix('SHOAL_')} = {number}\n" for name, number in numbers.items())


def definitions(declarations):
    of_enums = {member for members in declarations.enums.values() for member in members}
    macros = {name: value for name, value in declarations.constants.items() if name not in of_enums}
    yield "\n# macros\n" + numbers_text(macros)
    before = ""
    for kind, name in declarations.order:
        if kind == "enum":
            yield ("\n" if before == "struct" else "") + enum_text(declarations, name)
        elif kind == "callback":
            yield ("\n\n" if before == "struct" else "\n") + f"{python_name(name)} = {declarations.callbacks[name]}\n"
        else:
            yield struct_text(declarations, declarations.structs[name])
        before = kind


def functions_text(declarations):
    functions = declarations.functions.items()
    lines = [wrapped(f'    "{name}": ({result}, [', arguments, "]),") for name, (result, arguments) in functions]
    return "\n\n# The return type and the arguments of each function.\nFUNCTIONS = {\n" + "".join(lines) + "}\n"


def names_of(declarations):
    constants = [name.removeprefix("SHOAL_") for name in declarations.constants]
    names = [*constants, *(python_name(name) for kind, name in declarations.order if kind != "enum"), "FUNCTIONS"]
    twice = [name for name, times in collections.Counter(names).items() if times > 1]
    if twice:
        raise Unreadable(f"two declarations would have one name in Python: {', '.join(twice)}")
    return names


def text_of(folder):
    """Returns the module for the headers of a folder. Raises Unreadable if a declaration has an unknown form."""
    declarations = read(folder)
    names = names_of(declarations)
    body = "".join(definitions(declarations)) + functions_text(declarations)
    used = sorted(set(re.findall(r"\bc_\w+\b", body)))
    exported = wrapped("__all__ = [", [f'"{name}"' for name in names], "]")
    return HEAD + wrapped("from ctypes import (", used, ")") + "\nfrom ._structures import Sized, begins\n\n" + exported + body


def differences():
    """Returns texts that describe how the existing module differs from the headers; none if it does not."""
    try:
        wanted = text_of(HEADERS)
    except Unreadable as reason:
        return [str(reason)]
    if not WRITTEN.exists() or WRITTEN.read_text() != wanted:
        return ["it differs from the headers of include/shoal: run dev/native.py"]
    return []


def main():
    if sys.argv[1:] == ["--check"]:
        for text in differences():
            print(f"{WRITTEN.relative_to(TOP)}: {text}")
        return 1 if differences() else 0
    if sys.argv[1:]:
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    try:
        WRITTEN.write_text(text_of(HEADERS))
    except Unreadable as reason:
        sys.exit(f"dev/native.py: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
