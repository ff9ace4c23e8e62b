"""embed.py FROM TO NAME: writes a C file that defines NAME, the text of a file that xz compressed."""
import lzma
import sys

from_path, to_path, name = sys.argv[1:]
with lzma.open(from_path, "rt", encoding="ascii") as text, open(to_path, "w", encoding="ascii") as to:
    to.write(f"extern const char {name}[];\nconst char {name}[] =\n")
    for line in text:
        to.write('"' + line.rstrip("\n").replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '\\n"\n')
    to.write(";\n")
