#!/usr/bin/env python3
"""Renders the public header, the pages of docs/ and the examples as HTML, with a search that needs no server.

  dev/docs.py build/docs/html                  all but the commands
  dev/docs.py build/docs/html build/shoal      also a page for each of its commands, from their help texts, and its settings

The header stays as it is read in an editor: its sections, its order, plain comments. A comment tells of the declarations that
follow it, up to the next one. In it, lines at the margin are paragraphs, "  - " begins an item of a list, what is indented by
four is shown as it is. Names become links, as do paths of pages. Wrong is, and ends with exit code 1: a declaration
without a text, a text that names what is not declared, a symbol of src/shoal.map without a place, a link to nothing."""
import html
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import man

TOP = pathlib.Path(__file__).resolve().parent.parent
HEADER, MANUAL, NAMES = "include/shoal/shoal.h", "manual.html", "names.html"
COMMANDS, SETTINGS = "commands", "commands/settings.html"
# Shown in the list of pages one by one; and those that are many, which have a page with all of them.
GROUPS = (("Guides", "docs/*.md"), ("Examples", "examples/*.c"), ("", "examples/fashion_mnist/fashion_mnist.c"),
          ("", "examples/torch/*/README.md"))
LISTS = (("Decisions", "docs/decisions"), ("Figures", "docs/figures"))
CODE = ("examples/**/*.[ch]", "examples/**/*.py")  # these have pages, too: texts and other examples link to them
wrong = []


# ---- The header: sections, items, declarations -----------------------------------------------------------------------------

class Item:
    """A comment and what it tells of."""

    def __init__(self, line, comment):
        self.line, self.comment, self.declarations = line, comment, []


class Declaration:
    def __init__(self, line, text):
        self.line, self.text = line, text
        self.kind, self.name = next((kind, match[1]) for kind, pattern in KINDS if (match := re.search(pattern, text)))


KINDS = (  # the first that fits; its group is the name
    ("macro", r"^#define (\w+)"),
    ("type", r"^typedef .*?\(\*(\w+)\)"),
    ("function", r"^SHOAL_API [^(]*?(\w+)\("),
    ("enum", r"^enum (\w+) {"),
    ("type", r"^struct (\w+)"),
    ("unknown", r"^(.*)"),
)


def comment_end(lines, i):
    return next(k for k in range(i, len(lines)) if "*/" in lines[k]) + 1


def comment_text(lines):
    """The text without its frame."""
    text = "\n".join(re.sub(r"^(/\*| \*)(?!/) ?", "", line) for line in lines)
    return re.sub(r" ?\*/$", "", text).splitlines()


def declaration_end(lines, i):
    """A macro goes on behind each backslash, all else to the semicolon outside braces."""
    depth = 0
    is_macro = lines[i].startswith("#define")
    for k in range(i, len(lines)):
        depth += 0 if lines[k].startswith("#") else lines[k].count("{") - lines[k].count("}")
        if (is_macro and not lines[k].endswith("\\")) or (not is_macro and depth == 0 and lines[k].endswith(";")):
            return k + 1
    return len(lines)


def header_read(text):
    """(introduction, [(title, [Item])]): from the first section to what closes extern "C"."""
    lines = text.split('#ifdef __cplusplus\n}')[0].splitlines()
    introduction = Item(1, comment_text(lines[:comment_end(lines, 0)]))
    sections, i = [], 0
    while i < len(lines):
        start = i
        title = re.match(r"/\* -{4} (\d+\. .*?) -+ \*/", lines[i])
        if title:
            sections.append((title[1], []))
        elif not sections or not lines[i].strip():
            pass  # includes and attributes stand above the first section
        elif lines[i].startswith("/*"):
            i = comment_end(lines, i) - 1
            sections[-1][1].append(Item(start + 1, comment_text(lines[start:i + 1])))
        else:
            i = declaration_end(lines, i) - 1
            if not sections[-1][1]:
                sections[-1][1].append(Item(start + 1, []))
            sections[-1][1][-1].declarations.append(Declaration(start + 1, "\n".join(lines[start:i + 1])))
        i += 1
    return introduction, sections


def list_of(enum, declarations):
    """The columns and rows of an enum that is made of a list of X(...); (None, None) for another."""
    columns = re.search(r"#define \w+\(([^)]*)\) SHOAL_##name", enum.text)
    used = re.search(r"^\s+(SHOAL_\w+_LIST)\(", enum.text, re.M)
    if not columns or not used:
        return None, None
    text = next((d.text for d in declarations if d.name == used[1]), "")
    rows = [re.findall(r'"[^"]*"|[^,\s"]+', row) for row in re.findall(r'\bX\(((?:"[^"]*"|[^)"])*)\)', text) if "," in row]
    rows += [[name.removeprefix("SHOAL_")] for name in re.findall(r"^\s+(SHOAL_\w+),?$", enum.text, re.M)]
    return columns[1].split(", "), rows


def names_of(sections):
    """Every declared name -> the line that declares it."""
    names = {}
    groups = [item.declarations for _, items in sections for item in items]
    for declaration, declarations in ((declaration, group) for group in groups for declaration in group):
        own = [declaration.name] if declaration.kind != "unknown" else []
        if declaration.kind == "enum":
            _, rows = list_of(declaration, declarations)
            own += [f"SHOAL_{row[0]}" for row in rows] if rows else re.findall(r"^\s+(SHOAL_\w+)", declaration.text, re.M)
        names.update(dict.fromkeys(own, declaration.line))
    return names


# ---- Links ------------------------------------------------------------------------------------------------------------------

class Links:
    def __init__(self, names, pages):
        self.names, self.pages = names, pages  # pages: source path -> where it is rendered

    def to_name(self, text, page):
        name = next((name for name in (text, f"SHOAL_{text}") if name in self.names), None)
        return f"{'' if page == MANUAL else relative(MANUAL, page)}#{name}" if name else None

    def to_page(self, text, page):
        """Of a path, or of the beginning of one: docs/decisions/0003."""
        found = [place for source, place in self.pages.items() if source == text or
                 (text.startswith("docs/") and source.startswith(f"{text}-") and source.endswith(".md"))]
        return relative(found[0], page) if len(found) == 1 else None

    def code(self, text, page):
        """Inline code, a link where it names something."""
        name = re.match(r"(?:(?:struct|enum) )?(\w+)(?:\(\))?$", text)
        href = (name and self.to_name(name[1], page)) or self.to_page(text, page)
        code = f"<code>{html.escape(text, False)}</code>"
        return f'<a href="{href}">{code}</a>' if href else code


def relative(target, page):
    return os.path.relpath(target, os.path.dirname(page) or ".")


# ---- The manual -------------------------------------------------------------------------------------------------------------

def marked(pattern, replace, text):
    """HTML of text: what fits the pattern is replaced, all else is shown as it is."""
    out, at = [], 0
    for match in re.finditer(pattern, text, re.S):
        out += [html.escape(text[at:match.start()], False), replace(match)]
        at = match.end()
    return "".join(out) + html.escape(text[at:], False)


def inline_html(text, links, line):
    def replace(match):
        code, name, path = match.groups()
        if name and name.startswith("shoal_") and name not in links.names:
            wrong.append(f"{HEADER}:{line}: the text names {name}, which is not declared: mend the name")
        return links.code(code or name or path, MANUAL)
    return marked(r"`([^`]+)`|\b(shoal_\w+|SHOAL_\w+|ERR_[A-Z_]+|PENDING)\b|\b((?:docs|examples)/[\w/.-]*\w)", replace, text)


def comment_html(item, links):
    out, kind, block = [], None, []

    def close():
        text = textwrap.dedent("\n".join(block)).strip("\n")
        if kind == "pre" and text:
            out.append(f"<pre>{code_html(text, links)}</pre>")
        elif text:
            out.append(f"<{kind}>{inline_html(text, links, item.line)}</{kind}>")
        block.clear()

    for line in item.comment:
        is_item, is_deep = line.startswith("  - "), line.startswith("    ")
        now = "li" if is_item or (is_deep and kind == "li") else "pre" if is_deep or (not line and kind == "pre") else "p"
        if not line and kind != "pre" or now != kind or is_item:
            close()
            kind = now
        block.append(line[4:] if is_item else line)
    close()
    return re.sub(r"((?:<li>.*?</li>\n?)+)", r"<ul>\1</ul>\n", "\n".join(out), flags=re.S)


def code_html(text, links, own=()):
    """C with comments set back and names linked; an own name is where links to it lead."""
    def replace(match):
        comment, name = match.groups()
        if comment:
            return f"<i>{html.escape(comment, False)}</i>"
        if name in own:
            return f'<b id="{name}">{name}</b>'
        return f'<a href="#{name}">{name}</a>' if name in links.names else name
    return marked(r"(/\*.*?\*/)|\b([A-Za-z_]\w*)\b", replace, text)


def signature(text):
    """Without the attributes that all have, wrapped anew between parameters."""
    words = re.sub(r"\bSHOAL_(API|MUST_USE) ", "", " ".join(text.split()))
    words = words.replace(" ", "\0").replace(",\0", ", ").replace("(", "( ", 1)
    lines = textwrap.wrap(words, 96, subsequent_indent="        ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ").replace("( ", "(", 1)


def enum_html(declaration, columns, rows, links):
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell.strip(chr(34)), False)}</td>" for cell in row[1:])
        body.append(f'<tr id="SHOAL_{row[0]}"><td><code>SHOAL_{row[0]}</code></td>{cells}</tr>')
    title = f'<pre>{code_html(f"enum {declaration.name}", links, {declaration.name})}</pre>'
    return f"{title}\n<table><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(body) + "\n</tbody></table>"


def declaration_html(declaration, declarations, links):
    columns, rows = list_of(declaration, declarations) if declaration.kind == "enum" else (None, None)
    if rows:
        return enum_html(declaration, columns, rows, links)
    text = declaration.text
    own = {declaration.name}
    if declaration.kind == "function":
        text = signature(text)
    elif declaration.kind == "enum":
        own.update(re.findall(r"^\s+(SHOAL_\w+)", text, re.M))
    elif declaration.name.endswith("_LIST"):
        text = text.split("\\\n")[0].split(" X(")[0].rstrip() + " ..."  # the enum below shows its rows
    elif declaration.kind == "macro":
        text = re.sub(r"\s*\\\n\s*", " ", text)
    elif declaration.kind == "unknown":
        wrong.append(f"{HEADER}:{declaration.line}: dev/docs.py cannot read this declaration: add its kind to KINDS")
    return f"<pre>{code_html(text, links, own)}</pre>"


def manual_html(introduction, sections, links):
    out = ["<h1>Manual</h1>", comment_html(introduction, links)]
    for title, items in sections:
        out.append(f'<h2 id="section-{title.split(".")[0]}">{html.escape(title)}</h2>')
        for item in items:
            if not item.comment and any(declaration.kind != "macro" for declaration in item.declarations):
                wrong.append(f"{HEADER}:{item.line}: {item.declarations[0].name} has no text: write a comment above it")
            out += ['<div class="item">', comment_html(item, links)]
            out += [declaration_html(declaration, item.declarations, links) for declaration in item.declarations]
            out.append("</div>")
    return "\n".join(out)


# ---- Commands and examples --------------------------------------------------------------------------------------------------

def rows_html(lines):
    rows = "".join(f"<dt><code>{html.escape(term)}</code></dt><dd>{html.escape(text, False)}</dd>\n" for term, text in man.rows_of(lines))
    return f"<dl>\n{rows}</dl>"


def block_html(lines, is_code=False):
    """Lines below a heading of a help text."""
    if is_code:
        return f"<pre>{html.escape(textwrap.dedent(chr(10).join(lines)), False)}</pre>"
    if man.is_table(lines) or lines[0].lstrip().startswith("-"):
        return rows_html(lines)
    return f"<p>{html.escape(' '.join(line.strip() for line in lines), False)}</p>"


def help_html(title, text):
    """A help text, whose shape dev/man.py describes."""
    out = [f"<h1>{html.escape(title)}</h1>"]
    for lines in (chunk.splitlines() for chunk in re.split(r"\n\s*\n", text.strip("\n"))):
        heading = re.match(r"(\S[^:]*):$", lines[0])
        depth = next((i for i, line in enumerate(lines) if man.indent_of(line)), len(lines))
        if heading and len(lines) > 1:
            out += [f'<h2 id="{slug(heading[1])}">{html.escape(heading[1])}</h2>',
                    block_html(lines[1:], man.NAMES.get(heading[1]) in ("EXAMPLES", "SYNOPSIS"))]
        elif lines[0].startswith("Usage:"):
            out.append(block_html(lines, True))
        else:
            is_options = lines[0].lstrip().startswith("-") or depth == 0 and man.is_table(lines)
            out += [block_html(part, is_code) for part, is_code in ((lines[:depth], False), (lines[depth:], not is_options)) if part]
    return "\n".join(out)


def settings_html(text):
    """`shoal info --settings`: a line with name, value, default; below it, indented, what it means."""
    found = re.findall(r"^(SHOAL_\w+)\b.*\((default [^)]*)\)\n((?:[ \t]+\S.*\n)+)", text, re.M)
    rows = [f'<dt id="{name}"><code>{name}</code> ({html.escape(default, False)})</dt>'
            f"<dd>{html.escape(' '.join(meaning.split()), False)}</dd>" for name, default, meaning in found]
    return "<h1>Settings</h1>\n<p>Variables of the environment that the library reads, in every program that uses it.</p>\n<dl>\n" + (
        "\n".join(rows) + "\n</dl>")


def command_pages(command):
    """Page -> (what the list calls it, HTML)."""
    own = man.ask(command, "--help")
    pages = {f"{COMMANDS}/shoal.html": ("shoal", help_html("shoal", own))}
    for name in man.commands_of(own):
        pages[f"{COMMANDS}/{name}.html"] = (f"shoal {name}", help_html(f"shoal {name}", man.ask(command, name, "--help")))
    pages[SETTINGS] = ("Settings", settings_html(man.ask(command, "info", "--settings")))
    return pages


def example_html(source, links, page):
    text = (TOP / source).read_text()
    if source.endswith(".py"):
        code = html.escape(text, False)
    else:
        def replace(match):
            href = match[2] and links.to_name(match[2], page)
            return f"<i>{html.escape(match[1], False)}</i>" if match[1] else f'<a href="{href}">{match[2]}</a>' if href else match[2]
        code = marked(r"(/\*.*?\*/|//[^\n]*)|\b((?:shoal|SHOAL)_\w+)\b", replace, text)
    return f"<h1>{source}</h1>\n<pre>{code}</pre>"


def list_html(title, folder, pages):
    """A page of all pages of a folder."""
    page = f"{folder}/index.html"
    rows = [f'<li><a href="{relative(place, page)}">{html.escape(title_of(source), False)}</a></li>'
            for source, place in pages.items() if pathlib.PurePath(source).match(f"{folder}/*.md")]
    return f"<h1>{title}</h1>\n<ul>\n" + "\n".join(rows) + "\n</ul>"


def names_html(names):
    rows = [f'<li><a href="{MANUAL}#{name}"><code>{name}</code></a></li>' for name in sorted(names, key=str.lower)]
    return "<h1>Names</h1>\n<ul>\n" + "\n".join(rows) + "\n</ul>"


# ---- Pages of Markdown ------------------------------------------------------------------------------------------------------

def markdown_html(source, page, links):
    result = subprocess.run(["cmark-gfm", "--extension", "table", "--validate-utf8"], input=(TOP / source).read_text(),
                            capture_output=True, text=True, check=True)
    text = re.sub(r"(?<!<pre>)<code>([^<]*)</code>(?!</a>)", lambda m: links.code(html.unescape(m[1]), page), result.stdout)
    text = re.sub(r"<h(\d)>(.*?)</h\1>", lambda m: f'<h{m[1]} id="{slug(m[2])}">{m[2]}</h{m[1]}>', text)
    text = re.sub(r'href="([^":#]+)\.md(#[^"]*)?"', r'href="\1.html\2"', text)
    text = re.sub(r"<pre>(?=<code[^>]*>([^<]*))", lambda m: f"<pre{' class=drawing' if is_drawing(html.unescape(m[1])) else ''}>", text)
    plot = (TOP / source).with_suffix(".svg")
    return text + (f'<p><img src="{plot.name}" alt="{plot.stem}"></p>' if plot.exists() else "")


def is_drawing(code):
    """Columns that stand below one another: its lines are not to be broken. A comment behind a command is none."""
    return sum(bool(re.search(r"\S {3,}(?![#/ ])|[|/\\] +[|/\\]|^ *[|+]--", line)) for line in code.splitlines()) > 1


def slug(heading):
    return re.sub(r"\W+", "-", re.sub(r"<[^>]*>", "", heading).lower()).strip("-")


def title_of(source):
    if not source.endswith(".md"):
        return source.removeprefix("examples/")
    return re.search(r"^#+ (.*)", (TOP / source).read_text(), re.M)[1].replace("`", "")


def pages_find():
    """Source path -> path below the output folder; plots are copied as they are."""
    sources = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    patterns = [pattern for _, pattern in GROUPS] + [f"{folder}/*.md" for _, folder in LISTS] + list(CODE)
    sources += [path.relative_to(TOP).as_posix() for pattern in patterns for path in sorted(TOP.glob(pattern))]
    pages = {source: source.removesuffix(".md") + ".html" for source in sources}
    plots = {path.relative_to(TOP).as_posix() for path in TOP.glob("docs/figures/*.svg")}
    return {**pages, "README.md": "index.html", HEADER: MANUAL, **{plot: plot for plot in plots}}


# ---- The whole --------------------------------------------------------------------------------------------------------------

def nav_html(page, pages, sections, commands):
    def link(target, text):
        current = ' aria-current="page"' if target == page else ""
        return f'<a href="{relative(target, page) if "#" not in target else target}"{current}>{html.escape(text)}</a>'
    own = "" if page == MANUAL else relative(MANUAL, page)
    out = [link("index.html", "Shoal"), "<b>Manual</b>"]
    out += [link(f'{own}#section-{title.split(".")[0]}', title) for title, _ in sections] + [link(NAMES, "All names")]
    for group, pattern in GROUPS:
        if group == "Examples" and commands:
            out += ["<b>Commands</b>", *(link(place, text) for place, (text, _) in commands.items())]
        out += [f"<b>{group}</b>"] if group else []
        out += [link(pages[source], title_of(source)) for source in pages if pathlib.PurePath(source).match(pattern)
                and len(pathlib.PurePath(source).parts) == len(pathlib.PurePath(pattern).parts)]
    out += ["<b>Project</b>", *(link(f"{folder}/index.html", title) for title, folder in LISTS),
            link("CHANGELOG.html", "Changelog"), link("CONTRIBUTING.html", "Contributing")]
    return "\n".join(out)


def page_title(body):
    return html.unescape(re.sub(r"<[^>]*>", "", re.search(r"<h\d[^>]*>(.*?)</h\d>", body)[1]))


def write(out, page, body, nav):
    title, top = html.escape(page_title(body), False), relative("index.html", page).removesuffix("index.html")
    path = out / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}{'' if title == 'Shoal' else ' - Shoal'}</title>
<link rel="stylesheet" href="{relative('docs.css', page)}">
<script src="{relative('docs.js', page)}" data-top="{top}" defer></script>
</head>
<body>
<header>
<a href="{relative('index.html', page)}">Shoal</a>
<input type="search" placeholder="Search" aria-label="Search these pages" autocomplete="off">
<a href="#pages">Pages</a>
<ol hidden></ol>
</header>
<main>
{body}
</main>
<nav id="pages">
{nav}
</nav>
</body>
</html>
""")


# ---- The search -------------------------------------------------------------------------------------------------------------

PLACE = r'<h\d id="([^"]*)"[^>]*>|<b id="(\w+)">|<dt id="(\w+)">|<tr id="(\w+)">'


def entries_of(page, body):
    """[page#place, title, where, text] for each part of a page that a link can lead to."""
    title, starts = page_title(body), [(0, "")]
    starts += [(match.start(), next(filter(None, match.groups()), "")) for match in re.finditer(PLACE, body)]
    ends = [start for start, _ in starts[1:]] + [len(body)]
    for (start, place), end in zip(starts, ends):
        text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body[start:end])).split())
        heading = re.match(r"<h\d[^>]*>(.*?)</h\d>", body[start:end], re.S)
        name = html.unescape(re.sub(r"<[^>]*>", "", heading[1])) if heading else place or title
        if text:
            yield [f"{page}#{place}" if place else page, name, "" if name == title else title, text]


def search_write(out, bodies):
    """A script that sets a variable: pages that are opened as files may not fetch."""
    entries = [entry for page, body in bodies.items() for entry in entries_of(page, body)]
    (out / "search.js").write_text(f"shoalSearch({json.dumps(entries, ensure_ascii=False, separators=(',', ':'))});\n")


class Page(html.parser.HTMLParser):
    """What a page holds: places that links can lead to, and links."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src"):
                self.links.append(value)


def check(out, symbols):
    found = {path.relative_to(out).as_posix(): Page(path) for path in sorted(out.rglob("*.html"))}
    for name, page in found.items():
        for link in (link for link in page.links if not re.match(r"\w+:", link)):
            path, _, place = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
            if not (out / target).is_file() or (place and place not in found[target].ids):
                wrong.append(f"{name}: the link to {link} leads nowhere")
        for place in sorted({place for place in page.ids if page.ids.count(place) > 1}):
            wrong.append(f"{name}: #{place} is there more than once")
    for symbol in symbols:
        if symbol not in found[MANUAL].ids:
            wrong.append(f"src/shoal.map: {symbol} has no place in the manual: declare it in {HEADER}")


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    if not shutil.which("cmark-gfm"):
        print("docs.py: there is no cmark-gfm here; dev/deps.sh docs installs it on Debian", file=sys.stderr)
        return 2
    out = pathlib.Path(sys.argv[1])
    if out.exists() and not out.is_dir():
        print(f"docs.py: {out} is no folder", file=sys.stderr)
        return 2
    if out.exists() and any(out.iterdir()) and not (out / "docs.css").exists():
        print(f"docs.py: {out} holds other things than these pages: name another folder, or empty it", file=sys.stderr)
        return 2
    shutil.rmtree(out, ignore_errors=True)
    introduction, sections = header_read((TOP / HEADER).read_text())
    names, pages = names_of(sections), pages_find()
    links, commands = Links(names, pages), command_pages(sys.argv[2]) if len(sys.argv) == 3 else {}
    bodies = {MANUAL: manual_html(introduction, sections, links), NAMES: names_html(names)}
    bodies |= {place: text for place, (_, text) in commands.items()}
    bodies |= {f"{folder}/index.html": list_html(title, folder, pages) for title, folder in LISTS}
    for source, page in pages.items():
        if source.endswith(".md"):
            bodies[page] = markdown_html(source, page, links)
        elif source.endswith(".svg"):
            (out / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / source, out / page)
        elif source != HEADER:
            bodies[page] = example_html(source, links, page)
    for page, body in bodies.items():
        write(out, page, body, nav_html(page, pages, sections, commands))
    search_write(out, {page: body for page, body in bodies.items() if page != NAMES and not page.startswith("docs/figures/bench")})
    for asset in ("docs.css", "docs.js"):
        shutil.copy(TOP / "dev" / asset, out / asset)
    check(out, re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M))
    print("\n".join(wrong) if wrong else f"{len(bodies)} pages, {len(names)} names: {out / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
