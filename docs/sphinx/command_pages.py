"""Pages made from the command's help texts. One text serves the site and, by Sphinx's man builder, shoal-run(1) and the like.

A help text consists of chunks separated by empty lines:

  Usage: shoal run [-n N] ...      the synopsis; or lines of it, indented, under "Usage:" or at the beginning
  Text at the margin               description; after the options: notes
      -n N         indented rows   options; a row that is indented more continues the one above
  Heading:                         a section: rows if two columns follow, else a text
  Examples:                        lines kept as they are
  Exit codes: 0 success, ...       in one line, or rows
"""
import os
import re
import subprocess
import textwrap

import rest

# None represents all other sections, in their order.
ORDER = ("Synopsis", "Description", "Commands", "Options", None, "Environment", "Exit status", "Examples", "See also")
NAMES = {"Usage": "Synopsis", "Examples": "Examples", "To begin": "Examples", "Exit code": "Exit status",
         "Exit codes": "Exit status"}
REQUIRED = ("Synopsis", "Options", "Exit status")


class Wrong(Exception):
    """A command that does not answer, or a help text of unknown form."""


def ask(*words):
    """Returns the command's output, independent of this build's environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    try:
        result = subprocess.run(words, env=clean, capture_output=True, text=True)
    except OSError as error:
        raise Wrong(f"cannot run {words[0]}: {error.strerror}") from None
    if result.returncode or not result.stdout.strip():
        raise Wrong(f"`{' '.join(map(str, words))}` gave exit code {result.returncode}: {result.stderr.strip() or 'it printed nothing'}")
    return result.stdout


def indent_of(line):
    return len(line) - len(line.lstrip())


def rows_of(lines):
    """Returns (term, text) of each row: two columns, separated by at least two spaces."""
    rows = []
    for line in lines:
        if indent_of(line) > indent_of(lines[0]) and rows:
            rows[-1][1] = f"{rows[-1][1]} {line.strip()}".strip()
        else:
            rows.append((re.split(r"\s{2,}", line.strip(), maxsplit=1) + [""])[:2])
    return rows


def text_of(lines):
    return [rest.escape(" ".join(line.strip() for line in lines)), ""]


def verbatim(lines):
    return rest.code(textwrap.dedent("\n".join(lines)).splitlines())


def is_table(lines):
    return all(re.search(r"\S\s{2,}\S", line) for line in lines if indent_of(line) == indent_of(lines[0]))


def titled_take(sections, title, lines):
    """Reads a heading and the indented lines below it."""
    name = NAMES.get(title, "Environment" if title.startswith("Environment") else title)
    add = sections.setdefault(name, []).extend
    if name == "Synopsis":
        rows = rows_of(lines)
        add(verbatim([term for term, _ in rows]))
        if any(text for _, text in rows):
            sections["Commands"] = rest.rows(rows)
    elif name == "Examples":
        add(verbatim(lines))
    else:
        add(text_of([f"{title}:"]) if name == "Environment" else [])
        add(rest.rows(rows_of(lines)) if is_table(lines) else text_of(lines))


def untitled_take(sections, lines):
    """Reads rows of options, a synopsis, or a text with indented lines below it."""
    depth = next((i for i, line in enumerate(lines) if indent_of(line)), len(lines))
    if depth == 0 and lines[0].lstrip().startswith("-"):
        sections.setdefault("Options", []).extend(rest.rows(rows_of(lines)))
    elif depth == 0 and "Synopsis" not in sections:
        sections["Synopsis"] = verbatim(lines)
    else:
        body = sections.setdefault("Notes" if "Options" in sections else "Description", [])
        body.extend(text_of(lines[:depth]) if depth else [])
        body.extend(verbatim(lines[depth:]) if depth < len(lines) else [])


def sections_of(help_text):
    sections = {}
    for chunk in re.split(r"\n\s*\n", help_text.strip("\n")):
        lines = chunk.splitlines()
        title = re.match(r"(\S[^:]*):$", lines[0])
        inline = re.match(rf"({'|'.join(NAMES)}): (.*)", lines[0])
        said = re.match(r"shoal(?: \w+)?: (.*)", lines[0])  # "shoal bench: how long ..."
        if title and len(lines) > 1:
            titled_take(sections, title[1], lines[1:])
        elif inline:
            name, text = NAMES[inline[1]], [inline[2], *lines[1:]]
            sections[name] = (verbatim if name == "Synopsis" else text_of)(text)
        elif said:
            sections["Description"] = text_of([said[1][0].upper() + said[1][1:], *lines[1:]])
        else:
            untitled_take(sections, lines)
    return sections


def commands_of(help_text):
    """Returns {name: summary} from the rows of `shoal --help`."""
    return dict(re.findall(r"^\s+shoal ([a-z]+(?: [a-z]+)?)\s{2,}(\S.*)$", help_text, re.M))


def page_name(command):
    """Returns shoal-sim-step for "sim step"."""
    return f"shoal-{command.replace(' ', '-')}"


def settings_of(text):
    """Returns (name, default, meaning) from `shoal info --settings`. Each setting has a line with name, value and default,
    and its meaning indented below."""
    found = re.findall(r"^(SHOAL_\w+)\b.*\((default [^)]*)\)\n((?:[ \t]+\S.*\n)+)", text, re.M)
    if len(found) != len(re.findall(r"^SHOAL_", text, re.M)):
        raise Wrong("`shoal info --settings` has a line that is no setting, or one without its meaning")
    return [(name, default, " ".join(meaning.split())) for name, default, meaning in found]


def page(title, sections, others):
    also = ["shoal", *map(page_name, others)]
    sections["See also"] = [", ".join(f":manpage:`{name}(1)`" for name in also if name != title.replace(" ", "-")) + ".", "",
                            "The library's manual is the header shoal/shoal.h, :manpage:`shoal(3)`.", ""]
    free = [name for name in sections if name not in ORDER]
    out = rest.heading(title, "=")
    for name in [name for place in ORDER for name in (free if place is None else [place])]:
        out += [*rest.heading(name, "-"), *sections[name]] if name in sections else []
    return "\n".join(out)


def settings_page(settings):
    out = [*rest.heading("Settings", "="), "Variables of the environment that the library reads, in every program that uses it.", ""]
    for name, default, meaning in settings:
        out += [f".. envvar:: {name}", "", f"   ({rest.escape(default)})", "", f"   {rest.escape(meaning)}", ""]
    return "\n".join(out)


def command_page(command, name, commands):
    sections = sections_of(ask(command, *name.split(), "--help"))
    for wanted in REQUIRED:
        if wanted not in sections:
            raise Wrong(f"`shoal {name} --help` says nothing that makes \"{wanted}\" (docs/sphinx/command_pages.py tells the shape of a help text)")
    sections.setdefault("Environment", []).extend([":manpage:`shoal(1)` lists the variables that the library reads.", ""])
    return page(f"shoal {name}", sections, commands)


def pages_of(command):
    """Returns ({name: text} of the pages, names of the settings, (page, name, summary) of each manual page)."""
    own = ask(command, "--help")
    commands, settings = commands_of(own), settings_of(ask(command, "info", "--settings"))
    sections = sections_of(own)
    sections["Environment"] = [
        *[".. only:: html", "", "   The library reads :doc:`settings`, in every program that uses it.", ""],
        *[".. only:: man", "", "   The library reads, in every program that uses it:", ""],
        *rest.indented(rest.rows((f"{name} ({default})", meaning) for name, default, meaning in settings))]
    pages = {"shoal": page("shoal", sections, commands), "settings": settings_page(settings)}
    pages |= {page_name(name): command_page(command, name, commands) for name in commands}
    summary = re.match(r"shoal: (.*?)\.?\n", own)
    if not summary:
        raise Wrong("`shoal --help` does not begin with \"shoal: \" and a summary")
    manuals = [("shoal", "shoal", summary[1]), *((page_name(name), page_name(name), text) for name, text in commands.items())]
    return pages, {name for name, _, _ in settings}, manuals
