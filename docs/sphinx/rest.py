"""Words for what the generators of pages write: reStructuredText."""
import re


def escape(text):
    """Text in which nothing is markup."""
    return re.sub(r"([\\*`|_])", r"\\\1", text)


def literal(text):
    return f"``{text}``" if text.strip() and "`" not in text else escape(text)


def heading(text, line):
    return [escape(text), line * (len(escape(text)) + 2), ""]


def indented(lines, by=3):
    return [" " * by + line if line else "" for line in lines]


def code(lines, language="text"):
    return [f".. code-block:: {language}", "", *indented(lines), ""]


def rows(terms):
    """A definition list of (term, text); a term is shown as it is."""
    out = []
    for term, text in terms:
        out += [literal(term), f"   {escape(text)}" if text else "   \\", ""]
    return out


def toctree(names):
    return [".. toctree::", "", *indented(names), ""]
