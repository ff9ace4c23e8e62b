#!/usr/bin/env python3
"""Draws docs/pictures/NAME.txt, plain descriptions of pictures, as NAME-light.svg and NAME-dark.svg.

  dev/drawings.py            draws them all
  dev/drawings.py --check    prints differences; exit code 1 if there are any (dev/check.py runs the same check)

A line of a description is a word and its values; values with blanks are quoted, and | begins a new line of a text. Lengths are
in tens of pixels. Names after = are those of svg.COLORS.

  title TEXT    desc TEXT    size WIDTH HEIGHT    # a comment
  box NAME X Y WIDTH HEIGHT TEXT [=COLOR]         text in its middle
  frame NAME X Y WIDTH HEIGHT TEXT                a broken line around other things, text in its corner
  text X Y TEXT [=COLOR] [start|middle|end] [bold] [small]
  line POINT POINT ... [=COLOR] [arrow|both] [broken]
                                                  a POINT is X Y, or NAME:SIDE for the middle of a side (n, s, e, w) of a box
"""
import pathlib
import shlex
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "dev"))

import written  # noqa: E402
from svg import COLORS, Picture  # noqa: E402

PICTURES = TOP / "docs/pictures"
UNIT, LINE = 10, 18  # pixels
EDGES = {"fill": "soft", "shoal-fill": "shoal", "alarm-fill": "alarm"}  # of boxes filled with a color


class Drawing:
    def __init__(self, lines):
        facts = {words[0]: words[1:] for words in lines if words[0] in ("title", "desc", "size")}
        width, height = (float(value) * UNIT for value in facts["size"])
        self.picture = Picture(width, height, facts["title"][0], facts["desc"][0])
        self.boxes = {}
        for word, *values in lines:
            if word not in facts:
                plain, options = options_of(values)
                getattr(self, f"_{word}")(plain, options)

    def _box(self, values, options):
        name, x, y, width, height, text = self._place(values)
        color = options.color or "fill"
        self.picture.box(x, y, width, height, color, EDGES.get(color, color), 5)
        lines = text.split("|")
        for number, line in enumerate(lines):
            down = y + height / 2 + 5 + (number - (len(lines) - 1) / 2) * LINE
            self.picture.write(x + width / 2, down, line, "text", "middle", *options.font())

    def _frame(self, values, options):
        name, x, y, width, height, text = self._place(values)
        self.picture.box(x, y, width, height, "back", options.color or "soft", 8, "5 4")
        self.picture.write(x + 10, y + 22, text, options.color or "soft", "start", "bold")

    def _place(self, values):
        """Remembers where the named box is. Returns the values with lengths in pixels."""
        name, *lengths, text = values
        self.boxes[name] = tuple(float(value) * UNIT for value in lengths)
        return (name, *self.boxes[name], text)

    def _text(self, values, options):
        x, y, text = float(values[0]) * UNIT, float(values[1]) * UNIT, values[2]
        anchor = next((word for word in ("middle", "end") if options.has(word)), "start")
        for number, line in enumerate(text.split("|")):
            self.picture.write(x, y + number * LINE, line, options.color or "text", anchor, *options.font())

    def _line(self, values, options):
        points, rest = [], list(values)
        while rest:
            word = rest.pop(0)
            points.append(self._side(*word.split(":")) if ":" in word else (float(word) * UNIT, float(rest.pop(0)) * UNIT))
        dash, color = "5 4" if options.has("broken") else "", options.color or "soft"
        self.picture.line(points, color, 1.8, dash, options.has("arrow") or options.has("both"))
        if options.has("both"):
            self.picture.line(points[1::-1], color, 1.8, dash, True)

    def _side(self, name, side):
        x, y, width, height = self.boxes[name]
        across, down = x + width / 2, y + height / 2
        return {"n": (across, y), "s": (across, y + height), "w": (x, down), "e": (x + width, down)}[side]


class Options:
    def __init__(self, words):
        self.color = next((word[1:] for word in words if word.startswith("=")), None)
        self.words = words

    def has(self, word):
        return word in self.words

    def font(self):
        """Returns weight and size."""
        return "bold" if self.has("bold") else "normal", 13 if self.has("small") else None


WORDS = ("start", "middle", "end", "bold", "small", "arrow", "both", "broken")


def options_of(values):
    options = [value for value in values if value in WORDS or (value.startswith("=") and value[1:] in COLORS["light"])]
    return [value for value in values if value not in options], Options(options)


def drawing_of(path):
    """Returns the picture of a description. Raises ValueError with the place of a mistake."""
    lines = [shlex.split(line, comments=True) for line in path.read_text().splitlines()]
    try:
        return Drawing([words for words in lines if words]).picture
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path.relative_to(TOP)}: {type(error).__name__}: {error}") from error


def wanted():
    """Returns each picture's path and text."""
    pictures = {path: drawing_of(path) for path in sorted(PICTURES.glob("*.txt"))}
    return {path.with_name(f"{path.stem}-{scheme}.svg"): picture.text(scheme)
            for path, picture in pictures.items() for scheme in COLORS}


def differences():
    """Returns (path, line, text) for each picture that differs from its description."""
    try:
        drawn = wanted()
    except ValueError as error:
        return [(PICTURES, 1, str(error))]
    return [(path, 1, "it differs from its description: run dev/drawings.py") for path, text in drawn.items()
            if not path.exists() or path.read_text() != text]


if __name__ == "__main__":
    sys.exit(written.run(__doc__, wanted, differences))
