"""Blocks of code in the guides. An HTML comment right above a block's fence chooses how it is tested:

    <!-- test: torch              run on two ranks by the Python of build/torch, after the lines that follow in the comment
    import torch
    -->
    <!-- test: sh                 run by bash after the lines that follow; they end with 77 if the machine lacks something
    <!-- test: file train.py      written to the page's folder, for later blocks
    <!-- test: skip REASON        not run

"python" blocks need a comment that names their interpreter; "sh" blocks without a comment are run as they are. A line "prints:
REGEX" of the comment is not part of the program: its output must match. The blocks of a page share a folder and are run in
order. "text" is not code."""
import dataclasses
import re

COMMENT = r"(?:^<!-- test: (?P<test>(?:(?!-->).)*?)\s*-->\n)?"
BLOCK = re.compile(COMMENT + r"^```(?P<language>[\w-]*)\n(?P<text>.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:\A|\n\n) {4}(?:shoal|make|python3|build/|import|from) ")
SHOWN = ("text",)
PROGRAMS = ("python", "sh", "c", "diff", "toml", "json", "dockerfile")


@dataclasses.dataclass
class Block:
    page: str
    line: int
    language: str
    text: str
    how: str         # the first word of the comment: an interpreter, sh, file or skip
    rest: str        # the rest of its first line
    before: str      # the program's lines before the block
    prints: list     # what its output must match

    @property
    def name(self):
        is_interpreter = self.how not in (self.language, "skip", "file")
        return f"{self.page}:{self.line} {self.language}{f' for {self.how}' if is_interpreter else ''}"

    @property
    def program(self):
        """Returns the program that the test runs, for a difference its new side."""
        text = self.text
        if self.language == "diff":
            text = "".join(line[2:] + "\n" for line in text.splitlines() if not line.startswith("-"))
        return self.before + text


def blocks_of(page, text):
    """Returns the page's blocks of code in order. Raises ValueError if one has no language or no way to be tested."""
    found = [block_of(page, text, match) for match in BLOCK.finditer(text)]
    if INDENTED.search(text):
        start = INDENTED.search(text)[0].strip()
        raise ValueError(f"{page}: \"{start} ...\" is indented code, which no test sees: put it between fences")
    return [block for block in found if block.language not in SHOWN]


def block_of(page, text, match):
    line = text[:match.start("text")].count("\n")  # that of the fence
    head, _, more = (match["test"] or "").partition("\n")
    how, _, rest = (head or "sh" * (match["language"] == "sh")).partition(" ")
    lines = more.splitlines()
    prints = [line.removeprefix("prints: ") for line in lines if line.startswith("prints: ")]
    before = "".join(f"{line}\n" for line in lines if not line.startswith("prints: "))
    block = Block(page, line, match["language"], match["text"], how, rest.strip(), before, prints)
    if block.language not in (*SHOWN, *PROGRAMS):
        names = ", ".join((*SHOWN, *PROGRAMS))
        raise ValueError(f"{page}:{line}: the block's language is \"{block.language}\": one of {names} is needed")
    if block.language not in SHOWN and not block.how:
        raise ValueError(f"{page}:{line}: put a comment \"<!-- test: ... -->\" above the block (tests/python/guide_blocks.py)")
    if block.how == "skip" and not block.rest:
        raise ValueError(f"{page}:{line}: why is the block skipped?")
    return block


def shoal_options(text):
    """Returns (words, options) of each command `shoal` in a shell program: "job run", {"--name"}. Options after a program that
    shoal starts are not its own."""
    found = []
    for command in re.split(r"\n|\||;|&&", text.replace("\\\n", " ")):
        words = [word for word in command.partition("#")[0].split() if not re.match(r"[A-Z_]+=|<|\d?>", word)]
        if words and words[0].rpartition("/")[2] == "shoal" and len(words) > 1:
            has_parts = words[1] in ("job", "sim", "bench") or words[1:3] == ["explain", "pipeline"]
            count = 2 if has_parts and len(words) > 2 and re.match(r"[a-z]+$", words[2]) else 1
            options = []
            for word in words[1 + count:]:
                if re.match(r"(\./|python3|bash|sh$|build/)", word) or word == "--":
                    break
                options += [word.partition("=")[0]] if word.startswith("--") else []
            found.append((" ".join(words[1:1 + count]), options))
    return found
