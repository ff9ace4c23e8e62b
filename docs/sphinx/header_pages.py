"""Pages of the public headers. Hawkmoth (with libclang) reads the declarations; this module does the rest.

A header keeps the form that people read in an editor: sections, their order, plain comments. A comment describes the
declarations after it, up to the next comment; after a member it describes the member. Hawkmoth needs a comment that begins
with two stars before each declaration. So it gets a copy with such comments on exactly the same lines, and its messages
name lines of the header.

In a comment, lines at the margin are paragraphs, "  - " begins a list item, text indented by four is shown as it is, and
names become links. A declaration without a text is an error. Sphinx reports a text that names something undeclared as a
dead link.
"""
import re
import textwrap
from dataclasses import dataclass, field

import rest

SECTION = r"/\* -{4} (\d+)\. (.*?) -+ \*/"
ROLES = {"FunctionDocstring": "func", "StructDocstring": "struct", "UnionDocstring": "union", "EnumDocstring": "enum",
         "EnumeratorDocstring": "enumerator", "MacroDocstring": "macro", "MacroFunctionDocstring": "macro",
         "TypedefDocstring": "type", "TypedefFunctionDocstring": "type"}


@dataclass
class Section:
    number: str
    title: str
    line: int
    found: list = field(default_factory=list)  # Hawkmoth's docstrings

    @property
    def name(self):
        return re.sub(r"\W+", "_", self.title.lower()).strip("_")


# ---- The copy ---------------------------------------------------------------------------------------------------------------

def comment_end(lines, i):
    return next(k for k in range(i, len(lines)) if "*/" in lines[k]) + 1


def declaration_end(lines, i):
    """Returns the line after a declaration. A macro continues after each backslash, other declarations to a semicolon
    outside braces."""
    depth = 0
    is_macro = lines[i].startswith("#define")
    for k in range(i, len(lines)):
        depth += 0 if lines[k].startswith("#") else lines[k].count("{") - lines[k].count("}")
        if (is_macro and not lines[k].endswith("\\")) or (not is_macro and depth == 0 and lines[k].endswith(";")):
            return k + 1
    return len(lines)


def enum_marked(lines, text):
    """Writes out an enum that is made from a list X(...), in its first line. The columns after the number are the texts."""
    if len(lines) == 1:
        return [re.sub(r"([{,] *)(\w+)", r"\1/** */ \2", lines[0])]
    body = "\n".join(lines)
    made, used = re.search(r"#define \w+\(([^)]*)\) (\w+)##name", body), re.search(r"^\s+(SHOAL_\w+_LIST)\(", body, re.M)
    if not made or not used:
        return members_marked(lines)
    columns, prefix = made[1].split(", "), made[2]
    listed = re.search(rf"^#define {used[1]}\(X\)((?:.*\\\n)*.*)", text, re.M)[1]
    out = []
    for row in re.findall(r'\bX\(((?:"[^"]*"|[^)"])*)\)', listed):
        name, number, *more = re.findall(r'"[^"]*"|[^,\s"]+', row)
        told = [value.strip('"') if column == "text" else f"{column}: {value}" for column, value in zip(columns[2:], more)]
        out.append(f"/** {', '.join(told)} */ {prefix}{name} = {number},")
    out += [f"/** */ {name}," for name in re.findall(r"^\s+(SHOAL_\w+),?$", body, re.M)]
    return [lines[0] + " " + " ".join(out), *[""] * (len(lines) - 2), lines[-1]]


def members_marked(lines):
    """Moves the comment after a member before it. A member without a comment gets an empty one."""
    out, open_member, was_comment = [lines[0]], "", False
    for line in lines[1:-1]:
        member = re.match(r"(\s+)(\w.*?[;,])(?:\s*/\* ?(.*))?$", line)
        if open_member:
            done = line.endswith("*/")
            out.append(f"{line} {open_member}" if done else line)
            open_member = "" if done else open_member
        elif member and member[3] is None:
            out.append(line if was_comment else f"{member[1]}/** */ {member[2]}")
        elif member and member[3].endswith("*/"):
            out.append(f"{member[1]}/** {member[3]} {member[2]}")
        elif member:
            out.append(f"{member[1]}/** {member[3]}")
            open_member = member[2]
        else:
            out.append(re.sub(r"/\* ", "/** ", line))
        was_comment = out[-1].endswith("*/")
    return [*out, lines[-1]]


def marked(text):
    """Returns the header with comments as Hawkmoth needs them, from the first section on, line for line."""
    lines, i, was_comment = text.splitlines(), 0, False
    i = next(k for k, line in enumerate(lines) if re.match(SECTION, line))
    out = lines[:i]
    while i < len(lines):
        end = i + 1
        if re.match(SECTION, lines[i]) or not lines[i] or re.match(r"#(?!define)|\}|extern ", lines[i]):
            out.append(lines[i])
        elif lines[i].startswith("/*"):
            end = comment_end(lines, i)
            out += ["/**" + lines[i][2:], *lines[i + 1:end]]
        else:
            end = declaration_end(lines, i)
            own = lines[i:end]
            if re.match(r"enum \w+ \{", own[0]):
                own = enum_marked(own, text)
            elif re.match(r"(struct|union) \w+ \{", own[0]):
                own = members_marked(own)
            out += [("" if was_comment else "/** */ ") + own[0], *own[1:]]
        was_comment = lines[i].startswith("/*") and not re.match(SECTION, lines[i])
        i = end
    return "\n".join(out) + "\n"


# ---- Texts ------------------------------------------------------------------------------------------------------------------

class Text:
    """Converts the text of comments to reStructuredText. Hawkmoth uses it to process docstrings."""

    def __init__(self, roles, settings, has_pages):
        self.roles, self.settings, self.has_pages = roles, settings, has_pages

    def inline(self, text):
        out, at = [], 0
        for match in re.finditer(r"`([^`]+)`|\b(shoal_\w+|SHOAL_\w+|ERR_[A-Z_]+|PENDING)\b|\b((?:docs|examples)/[\w/.-]*\w)", text):
            code, name, path = match.groups()
            if path:
                markup = f":doc:`{path} </{path.removesuffix('.md')}>`" if self.has_pages else rest.literal(path)
            else:
                markup = self.link(code or name) or (rest.literal(code) if code else rest.escape(name))
            # Markup directly before a letter is not recognized.
            out += [rest.escape(text[at:match.start()]), markup, "\\ " if re.match(r"[\w=*<]", text[match.end():]) else ""]
            at = match.end()
        return "".join(out) + rest.escape(text[at:])

    def link(self, name):
        """Returns None if the name is not one of ours. Sphinx reports one like a function's that is not declared as a dead
        link."""
        full = next((full for full in (name, f"SHOAL_{name}") if full in self.roles), None)
        if full:
            return f":c:{self.roles[full]}:`{name} <{full}>`"
        if re.fullmatch(r"shoal_\w+", name):
            return f":c:func:`{name}`"
        return f":envvar:`{name}`" if name in self.settings else None

    def block(self, kind, lines):
        if kind == "pre":
            return rest.code(textwrap.dedent("\n".join(lines)).strip("\n").splitlines(), "c" if ";" in "".join(lines) else "text")
        text = self.inline(" ".join(line.strip() for line in lines).strip())
        return [f"- {text}" if kind == "li" else text, ""]

    def blocks(self, lines):
        out, kind, block = [], None, []
        for line in [*lines, None]:
            is_item, is_deep = (line or "").startswith("  - "), (line or "").startswith("    ")
            now = "li" if is_item or (is_deep and kind == "li") else "pre" if is_deep or (line == "" and kind == "pre") else "p"
            if line is None or is_item or now != kind or (not line and kind != "pre"):
                out += self.block(kind, block) if any(block) else []
                kind, block = now, []
            block += [line[4:] if is_item else line] if line is not None else []
        return out

    def remove_comment_markers(self, lines):
        text = "\n".join(re.sub(r"^(/\*\*| \*)(?!/) ?", "", line) for line in lines)
        lines[:] = re.sub(r" ?\*/$", "", text).splitlines()
        return 0

    def process_docstring(self, lines):
        lines[:] = self.blocks(lines)

    def nest_lines(self, lines, nest):
        lines[:] = rest.indented(lines, 3 * nest)


class MemberText(Text):
    """The comment of a member may begin in any column and continues below."""

    def process_docstring(self, lines):
        lines[:] = self.blocks([line.strip() for line in lines])


# ---- Pages ------------------------------------------------------------------------------------------------------------------

def is_bare(docstring):
    return not re.sub(r"[/*\s]", "", docstring._text or "")


def item(group, text):
    """Returns the directive of a declaration with its members; functions that share a text have one directive."""
    lines, _ = group[0].get_docstring(text)
    at = next((i for i, line in enumerate(lines) if line.startswith(".. ")), None)
    for other in group[1:]:
        directive = next(line for line in other.get_docstring(text)[0] if line.startswith(".. "))
        lines.insert(at + 1, "   " + directive.partition(":: ")[2])
        at += 1
    for member in group[0]:
        lines += member.get_docstring(MemberText(text.roles, text.settings, text.has_pages))[0]
    return [*lines, ""]


def groups_of(section):
    """Groups functions: one without a text shares the text of the function before it."""
    groups = []
    for docstring in section.found:
        is_function = ROLES.get(type(docstring).__name__) == "func"
        if groups and is_function and is_bare(docstring) and ROLES.get(type(groups[-1][-1]).__name__) == "func":
            groups[-1].append(docstring)
        else:
            groups.append([docstring])
    return groups


def section_page(section, text):
    out = rest.heading(f"{section.number}. {section.title}", "=")
    for group in groups_of(section):
        out += item(group, text)
    return "\n".join(out)


@dataclass
class Header:
    path: object
    introduction: list
    sections: list
    wrong: list  # Hawkmoth's messages

    @property
    def folder(self):
        """Returns the folder of its pages."""
        return "manual" if self.path.stem == "shoal" else self.path.stem

    @property
    def manual(self):
        """Returns the prefix of its manual pages' names."""
        return "shoal" if self.path.stem == "shoal" else f"shoal_{self.path.stem}"


def read(path, copy):
    from hawkmoth.parser import parse
    from hawkmoth.util import compiler
    header = path.read_text()
    copy.write_text(marked(header))
    lines = header.splitlines()
    introduction = [re.sub(r"^(/\*| \*)(?!/) ?", "", line) for line in lines[:comment_end(lines, 0) - 1]]
    sections = [Section(*match.groups(), number) for number, line in enumerate(lines, 1) if (match := re.match(SECTION, line))]
    root, errors = parse(str(copy), domain="c", clang_args=[*compiler.get_include_args("cc"), f"-I{path.parent.parent}"])
    for docstring in root:
        section = [section for section in sections if section.line < docstring.get_line()][-1]
        section.found.append(docstring)
    return Header(path, introduction, sections, [f"{path.name}:{error.line}: {error.message}" for error in errors])


def roles_of(sections):
    roles = {}
    for docstring in (docstring for section in sections for docstring in section.found):
        for one in (docstring, *docstring):
            role = ROLES.get(type(one).__name__)
            roles |= {one.get_name(): role} if role else {}
    return roles


def textless(path, sections):
    """Yields an error if the first declaration of a section, before any comment, is not a macro."""
    for section in sections:
        first = section.found[0] if section.found else None
        if first and is_bare(first) and ROLES.get(type(first).__name__) not in (None, "macro"):
            yield f"{path.name}:{first.get_line()}: {first.get_name()} has no text: write a comment above it"


def index_page(header, text):
    title = "Manual" if header.folder == "manual" else f"shoal/{header.path.name}"
    return "\n".join([*rest.heading(title, "="), *text.blocks(header.introduction), *rest.toctree([one.name for one in header.sections])])


def manuals_of(header):
    summary = "collective communication for data-parallel training"
    yield f"{header.folder}/index", header.manual, summary if header.folder == "manual" else f"the manual of shoal/{header.path.name}", []
    for section in header.sections:
        functions = [one.get_name() for one in section.found if ROLES.get(type(one).__name__) == "func"]
        yield f"{header.folder}/{section.name}", f"{header.manual}_{section.name}", section.title.lower(), functions


def pages_of(paths, copies, settings, has_pages):
    """Returns ({name: text} of the pages, roles of the names, manual pages as in command_pages with their functions,
    errors). `copies` is a folder. has_pages: links to pages of docs/ and examples/ have targets."""
    headers = [read(path, copies / path.name) for path in paths]
    roles = roles_of([section for header in headers for section in header.sections])
    text = Text(roles, settings, has_pages)
    pages, manuals, wrong = {}, [], []
    for header in headers:
        pages[f"{header.folder}/index"] = index_page(header, text)
        pages |= {f"{header.folder}/{section.name}": section_page(section, text) for section in header.sections}
        manuals += manuals_of(header)
        wrong += [*header.wrong, *textless(header.path, header.sections)]
    return pages, roles, manuals, wrong
