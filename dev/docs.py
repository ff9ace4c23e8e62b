#!/usr/bin/env python3
"""Renders the public header and the pages of docs/ as HTML.

  dev/docs.py build/docs/html

The header stays as it is read in an editor: its sections, its order, plain comments. A comment tells of the declarations that
follow it, up to the next one. In it, lines at the margin are paragraphs, "  - " begins an item of a list, what is indented by
four is shown as it is. Names become links, as do paths of pages. Wrong is, and ends with exit code 1: a declaration
without a text, a text that names what is not declared, a symbol of src/shoal.map without a place, a link to nothing."""
import html
import html.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

TOP = pathlib.Path(__file__).resolve().parent.parent
HEADER, MANUAL, NAMES = "include/shoal/shoal.h", "manual.html", "names.html"
GROUPS = (("Guides", "docs/*.md"), ("Decisions", "docs/decisions/*.md"), ("Figures", "docs/figures/*.md"))
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
    plot = (TOP / source).with_suffix(".svg")
    return text + (f'<p><img src="{plot.name}" alt="{plot.stem}"></p>' if plot.exists() else "")


def slug(heading):
    return re.sub(r"\W+", "-", re.sub(r"<[^>]*>", "", heading).lower()).strip("-")


def title_of(source):
    return re.search(r"^#+ (.*)", (TOP / source).read_text(), re.M)[1]


def pages_find():
    """Source path -> path below the output folder; plots are copied as they are."""
    sources = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    sources += [path.relative_to(TOP).as_posix() for _, pattern in GROUPS for path in sorted(TOP.glob(pattern))]
    pages = {source: source.removesuffix(".md") + ".html" for source in sources}
    plots = {path.relative_to(TOP).as_posix() for path in TOP.glob("docs/figures/*.svg")}
    return {**pages, "README.md": "index.html", HEADER: MANUAL, **{plot: plot for plot in plots}}


# ---- The whole --------------------------------------------------------------------------------------------------------------

def nav_html(page, pages, sections):
    def link(target, text):
        current = ' aria-current="page"' if target == page else ""
        return f'<a href="{relative(target, page) if "#" not in target else target}"{current}>{html.escape(text)}</a>'
    own = "" if page == MANUAL else relative(MANUAL, page)
    out = [link("index.html", "Shoal"), "<b>Manual</b>"]
    out += [link(f'{own}#section-{title.split(".")[0]}', title) for title, _ in sections] + [link(NAMES, "All names")]
    for group, pattern in GROUPS:
        out.append(f"<b>{group}</b>")
        out += [link(pages[source], title_of(source)) for source in pages if pathlib.PurePath(source).match(pattern)
                and len(pathlib.PurePath(source).parts) == len(pathlib.PurePath(pattern).parts)]
    out += ["<b>Project</b>", link("CHANGELOG.html", "Changelog"), link("CONTRIBUTING.html", "Contributing")]
    return "\n".join(out)


def write(out, page, body, pages, sections):
    title = re.sub(r"<[^>]*>", "", re.search(r"<h\d[^>]*>(.*?)</h\d>", body)[1])
    path = out / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}{'' if title == 'Shoal' else ' - Shoal'}</title>
<link rel="stylesheet" href="{relative('docs.css', page)}">
</head>
<body>
<nav>
{nav_html(page, pages, sections)}
</nav>
<main>
{body}
</main>
</body>
</html>
""")


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
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
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
    links = Links(names, pages)
    write(out, MANUAL, manual_html(introduction, sections, links), pages, sections)
    write(out, NAMES, names_html(names), pages, sections)
    for source, page in pages.items():
        if source.endswith(".md"):
            write(out, page, markdown_html(source, page, links), pages, sections)
        elif source.endswith(".svg"):
            shutil.copy(TOP / source, out / page)
    shutil.copy(TOP / "dev/docs.css", out / "docs.css")
    check(out, re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M))
    print("\n".join(wrong) if wrong else f"{len(pages) + 1} pages, {len(names)} names: {out / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
