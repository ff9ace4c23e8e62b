"""A part of Fashion-MNIST, unpacked. Without it every worker of every training run would unpack all images again."""
import gzip
import pathlib
import struct

HEADERS = {"images-idx3": ">IIII", "labels-idx1": ">II"}  # magic number, count, height, width


def read(folder, name):
    path = pathlib.Path(folder, name)
    return path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{name}.gz").read_bytes())


def write_part(source, folder, **counts):
    """Writes the first images and labels of each set: train=COUNT, t10k=COUNT."""
    for kind, count in counts.items():
        for content, form in HEADERS.items():
            name = f"{kind}-{content}-ubyte"
            whole, begin = read(source, name), struct.calcsize(form)
            magic, _, *sides = struct.unpack_from(form, whole)
            bytes_each = 28 * 28 if sides else 1
            pathlib.Path(folder, name).write_bytes(struct.pack(form, magic, count, *sides) + whole[begin:begin + count * bytes_each])
