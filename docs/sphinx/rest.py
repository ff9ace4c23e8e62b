"""Functions that write reStructuredText, for the generators of pages."""
import re


def escape(text):
    """Escapes a text so that it contains no markup."""
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
    """Returns a definition list of (term, text). Terms are shown unchanged."""
    out = []
    for term, text in terms:
        out += [literal(term), f"   {escape(text)}" if text else "   \\", ""]
    return out


def toctree(names):
    return [".. toctree::", "", *indented(names), ""]
