#!/usr/bin/env python3
"""Prints a manual page made from what the command says of itself.

  dev/man.py build/shoal         shoal(1), from `shoal --help` and `shoal info --settings`
  dev/man.py build/shoal run     shoal-run(1), from `shoal run --help`

A help text is made of chunks between empty lines:

  Usage: shoal run [-n N] ...      the synopsis; or lines of it, indented, under "Usage:" or at the beginning
  Text at the margin               description; below the options: notes
      -n N         indented rows   options; a row that is indented more goes on with the one above
  Heading:                         a section: rows if two columns stand below it, a text otherwise
  Examples:                        lines as they are
  Exit codes: 0 success, ...       in one line, or rows
"""
import os
import re
import subprocess
import sys
import textwrap

# None stands for all other sections, as they come.
ORDER = ("SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", None, "ENVIRONMENT", "EXIT STATUS", "EXAMPLES", "SEE ALSO")
NAMES = {"Usage": "SYNOPSIS", "Examples": "EXAMPLES", "To begin": "EXAMPLES", "Exit code": "EXIT STATUS",
         "Exit codes": "EXIT STATUS"}
ROFF = str.maketrans({"\\": r"\e", "-": r"\-", "~": r"\(ti", "^": r"\(ha", "'": r"\(aq", "`": r"\(ga", '"': r"\(dq"})


def fail(text):
    sys.exit(f"man.py: {text}")


def ask(*words):
    """What the command prints, whatever the environment of this build says."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    try:
        result = subprocess.run(words, env=clean, capture_output=True, text=True)
    except OSError as error:
        fail(f"cannot run {words[0]}: {error.strerror}")
    if result.returncode or not result.stdout.strip():
        fail(f"`{' '.join(words)}` gave exit code {result.returncode}: {result.stderr.strip() or 'it printed nothing'}")
    return result.stdout


def escape(text):
    text = text.translate(ROFF)
    return r"\&" + text if text.startswith(".") else text


def indent_of(line):
    return len(line) - len(line.lstrip())


def rows_of(lines):
    """(term, text) of each row: two columns, with two spaces at least between them."""
    rows = []
    for line in lines:
        if indent_of(line) > indent_of(lines[0]) and rows:
            rows[-1][1] = f"{rows[-1][1]} {line.strip()}".strip()
        else:
            rows.append((re.split(r"\s{2,}", line.strip(), maxsplit=1) + [""])[:2])
    return rows


def rows_print(lines):
    """Names of options and variables in bold, what they take in italics."""
    out = []
    for term, text in rows_of(lines):
        term = re.sub(r"(?<![\w\\])(\\-(?:\\-)?[a-z](?:\w|\\-)*|[A-Z]+_\w+)", r"\\fB\1\\fR", escape(term))
        term = re.sub(r"(?<=[ =])([A-Z]+)\b", r"\\fI\1\\fR", term)
        out += [".TP", term] + ([escape(text)] if text else [r"\&"])
    return out


def text_print(lines):
    return [".PP"] + [escape(line) for line in textwrap.wrap(" ".join(line.strip() for line in lines), 120)]


def verbatim_print(lines):
    text = textwrap.dedent("\n".join(lines)).splitlines()
    return [".PP", ".nf", ".RS 4"] + [escape(line) or r"\&" for line in text] + [".RE", ".fi"]


def is_table(lines):
    return all(re.search(r"\S\s{2,}\S", line) for line in lines if indent_of(line) == indent_of(lines[0]))


def body_print(lines):
    return rows_print(lines) if is_table(lines) else text_print(lines)


def titled_take(sections, title, lines):
    """A heading and what is indented below it."""
    name = NAMES.get(title, "ENVIRONMENT" if title.startswith("Environment") else title.upper())
    add = sections.setdefault(name, []).extend
    if name == "SYNOPSIS":
        rows = rows_of(lines)
        add(verbatim_print([term for term, _ in rows]))
        if any(text for _, text in rows):
            sections["COMMANDS"] = rows_print(lines)
    elif name == "EXAMPLES":
        add(verbatim_print(lines))
    else:
        if name == "ENVIRONMENT":
            add(text_print([f"{title}:"]))
        add(body_print(lines))


def untitled_take(sections, lines):
    """Rows of options, a synopsis, or a text with lines indented below it."""
    depth = next((i for i, line in enumerate(lines) if indent_of(line)), len(lines))
    if depth == 0 and lines[0].lstrip().startswith("-"):
        sections.setdefault("OPTIONS", []).extend(rows_print(lines))
    elif depth == 0 and "SYNOPSIS" not in sections:
        sections["SYNOPSIS"] = verbatim_print([line.strip() for line in lines])
    else:
        name = "NOTES" if "OPTIONS" in sections else "DESCRIPTION"
        body = sections.setdefault(name, [])
        body.extend(text_print(lines[:depth]) if depth else [])
        body.extend(verbatim_print(lines[depth:]) if depth < len(lines) else [])


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
            sections[name] = (verbatim_print if name == "SYNOPSIS" else text_print)(text)
        elif said:
            sections["DESCRIPTION"] = text_print([said[1][0].upper() + said[1][1:], *lines[1:]])
        else:
            untitled_take(sections, lines)
    return sections


def commands_of(help_text):
    """name -> summary, from the rows of `shoal --help`."""
    return dict(re.findall(r"^\s+shoal ([a-z]+)\s{2,}(\S.*)$", help_text, re.M))


def settings_print(text):
    """`shoal info --settings`: a line with name, value, default; below it, indented, what it means."""
    found = re.findall(r"^(SHOAL_\w+)\b.*\((default [^)]*)\)\n((?:[ \t]+\S.*\n)+)", text, re.M)
    if len(found) != len(re.findall(r"^SHOAL_", text, re.M)):
        fail("`shoal info --settings` has a line that is no setting, or one without its meaning")
    out = []
    for name, default, meaning in found:
        out += [".TP", rf"\fB{escape(name)}\fR ({escape(default)})", escape(" ".join(meaning.split()))]
    return out


def page(title, summary, version, sections, others):
    also = ["shoal", *(f"shoal-{name}" for name in others)]
    sections["SEE ALSO"] = [", ".join(rf"\fB{escape(name)}\fR(1)" for name in also if name != title) + ".", ".PP",
                            escape("The header shoal/shoal.h is the manual of the library.")]
    print(f'.TH {escape(title.upper())} 1 "" "{version}" "User Commands"')
    print(f".SH NAME\n{escape(title)} {escape('-')} {escape(summary)}")
    free = [name for name in sections if name not in ORDER]
    for name in [name for place in ORDER for name in (free if place is None else [place])]:
        if name in sections:
            print(f".SH {escape(name)}")
            print("\n".join(sections[name]))


def main():
    if "--help" in sys.argv:
        return print(__doc__)
    if len(sys.argv) not in (2, 3):
        fail("usage: dev/man.py SHOAL [COMMAND]")
    shoal, command = sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None
    own = ask(shoal, "--help")
    commands = commands_of(own)
    version = ask(shoal, "--version").strip()
    if command is None:
        sections = sections_of(own)
        sections["ENVIRONMENT"] = text_print(["The library reads, in every program that uses it:"])
        sections["ENVIRONMENT"] += settings_print(ask(shoal, "info", "--settings"))
        return page("shoal", re.match(r"shoal: (.*?)\.?\n", own)[1], version, sections, commands)
    if command not in commands:
        fail(f"`shoal --help` does not list '{command}', so it has no summary")
    sections = sections_of(ask(shoal, command, "--help"))
    for name in ("SYNOPSIS", "OPTIONS", "EXIT STATUS"):
        if name not in sections:
            fail(f"`shoal {command} --help` says nothing that makes {name} (dev/man.py --help shows the shape of a help text)")
    sections.setdefault("ENVIRONMENT", []).extend(text_print(["shoal(1) lists the variables that the library reads."]))
    page(f"shoal-{command}", commands[command], version, sections, commands)


if __name__ == "__main__":
    main()
