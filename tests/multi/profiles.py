"""Checks that are the same for profiles of every framework: refused arguments, and files that the tools read."""
import functools
import json
import os
import pathlib
import tempfile

from tap import call, expect

COMMAND = os.environ.get("SHOAL_COMMAND", pathlib.Path(__file__).resolve().parents[2] / "build/shoal")


def _refused(profile, kind, about, *arguments, **options):
    try:
        profile(*arguments, **options)
    except kind as error:
        expect(about in str(error), about, error)
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def refusals_of(profile):
    """Returns refused(kind, about, ...), which expects that profile(...) raises an error with that text."""
    return functools.partial(_refused, profile)


def tools_read_the_file_of(profile, kept):
    """Expects that the tools read the saved profile. `kept` is the number of values that one sample's backward pass needs."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "mine.json")
        profile.save(file)
        code, out, err = call(COMMAND, "advise", "--profile", file, "--samples", "1000", "--batch", "24", "--machine", "this",
                              "--per-machine", "2", "--format", "json")
        expect(code == 0 and not err, code, err)
        answer = json.loads(out)
        expect(answer["sure"]["sample_us"] == answer["sure"]["activations"] == "measured", answer["sure"])
        wanted = 1e3 * (profile.forward_ms + profile.backward_ms) / profile.batch
        expect(abs(answer["question"]["sample_us"] - wanted) < 1e-9 * wanted, answer["question"], wanted)
        expect(answer["points"][0]["ladder"][0]["activations_bytes"] == 12 * 4 * kept, answer["points"])
        code, out, err = call(COMMAND, "sim", "step", "--profile", file, "--print-profile")
        expect(code == 0 and json.loads(out)[1:] == json.loads(file.read_text())[1:], out, err)
