"""Sphinx's configuration. docs/sphinx/make.py writes the pages and runs Sphinx."""
import json
import os
import pathlib
import re

from docutils import nodes
from sphinx import addnodes

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = json.loads(pathlib.Path(os.environ["SHOAL_PAGES"]).read_text())


project = "Shoal"
version = release = re.search(r"version: '([\d.]+)'", (TOP / "meson.build").read_text())[1]
extensions = ["myst_parser"]
myst_heading_anchors = 4
smartquotes = False
html_theme = "furo"
html_title = f"Shoal {version}"
html_static_path = ["shoal.css", "selector.js"]
html_css_files = ["shoal.css"]
templates_path = ["templates"]
html_sidebars = {"**": ["sidebar/brand.html", "versions.html", "sidebar/search.html", "sidebar/scroll-start.html",
                        "sidebar/navigation.html", "sidebar/scroll-end.html"]}
html_context = {"folder": PAGES.get("folder", "")}
html_show_copyright = html_show_sphinx = html_copy_source = False
suppress_warnings = ["toc.not_included"]  # for pages that make.py lists without a tree; test_docs.py checks the lists
man_pages = [tuple(page) for page in PAGES["manuals"]]
man_show_urls = False
today = version  # in manual pages, so that the same sources make the same pages
man_make_section_directory = True
c_maximum_signature_line_length = 100
# Names from C and Python themselves, and types in Python signatures.
nitpick_ignore_regex = [("c:identifier", r"(u?int\d+|size)_t|FILE"), ("py:.*", ".*")]


def literal_links(app, doctree):
    """Turns code in our texts into a link if it names a page or a symbol of the manual."""
    for node in list(doctree.findall(nodes.literal)):
        target = reference_of(app.env, node.astext()) if isinstance(node.parent, (nodes.paragraph, nodes.entry)) else None
        if target and node.get("classes", []) == []:
            node.replace_self(addnodes.pending_xref("", node.deepcopy(), refdoc=app.env.docname, refwarn=True, refexplicit=True, **target))


def reference_of(env, text):
    name = re.match(r"(?:(?:struct|enum) )?(\w+)(?:\(\))?$", text)
    full = name and next((full for full in (name[1], f"SHOAL_{name[1]}") if full in PAGES["roles"]), None)
    if full:
        return {"refdomain": "c", "reftype": PAGES["roles"][full], "reftarget": full}
    page = text.removesuffix(".md")
    page = f"docs/{page}" if re.match(r"[\w-]+\.md$", text) else page  # pages of docs name each other without the folder
    if re.match(r"(docs|examples)/[\w/.-]+$", page) and page in env.found_docs:
        return {"refdomain": "std", "reftype": "doc", "reftarget": f"/{page}"}
    return None


def manual_page(app, doctree, name):
    """Makes the text above the first section a description. Pages of a header also get its #include line. Removes links to
    pages, which are useless on paper."""
    if app.builder.name != "man":
        return
    for link in list(doctree.findall(nodes.reference)):
        link.replace_self(link.children) if link.get("internal") else None
    page = doctree[0]
    own = [node for node in page[1:] if not isinstance(node, nodes.section)]
    if own:
        description = nodes.section("", nodes.title("", "Description"), *own, ids=["description"])
        page[:] = [page[0], *page_synopsis(name), description, *page[1 + len(own):]]


def page_synopsis(name):
    folder = name.split("/")[0]
    if folder == "commands":
        return []
    include = nodes.literal_block("", f"#include <shoal/{'shoal' if folder == 'manual' else folder}.h>")
    return [nodes.section("", nodes.title("", "Synopsis"), include, ids=["synopsis"])]


def setup(app):
    app.connect("doctree-read", literal_links)
    app.connect("doctree-resolved", manual_page)
