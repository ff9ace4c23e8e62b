#!/usr/bin/env python3
"""`make demo-job`: the notebook's cell, from data in S3 to the answers of the endpoint."""
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

from tap import Skip, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
LABELS = [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]  # of the first ten test images


def classes_of(model, images=10):
    """Returns the trained model's own answers for the first test images. Unpacks the archive and runs the script that made
    it."""
    with tempfile.TemporaryDirectory(prefix="shoal-model-") as folder:
        with tarfile.open(model) as archive:
            archive.extract("model.pth", folder)
        ask = ("import sys, train; data, _ = train.read_images(sys.argv[1], 't10k'); "
               "print(*train.predict_fn(data[:int(sys.argv[3])], train.model_fn(sys.argv[2])))")
        done = subprocess.run([sys.executable, "-c", ask, str(DATA), folder, str(images)], capture_output=True, text=True, timeout=200,
                              env={**os.environ, "PYTHONPATH": str(TOP / "examples/job/source")})
        expect(done.returncode == 0, done.stdout, done.stderr)
        return [int(one) for one in done.stdout.split()]


def notebook_cell_runs_from_data_to_answers():
    if not DATA.is_dir():
        raise Skip(f"there is no {DATA}: dev/deps.sh demo")
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as jobs:
        path = f"{os.environ['PYTHONPATH']}:{TOP / 'python/smdistributed'}"
        run = subprocess.run([sys.executable, str(TOP / "examples/job/demo.py")], capture_output=True, text=True, timeout=400,
                             env={**os.environ, "PYTHONPATH": path, "SHOAL_JOBS": jobs})
        expect(run.returncode == 0, run.stdout[-3000:], run.stderr[-3000:])
        accuracy = re.findall(r"epoch 2 test_accuracy=([0-9.]+);", run.stdout)
        expect(len(accuracy) == 1 and float(accuracy[0]) > 0.85, run.stdout[-3000:])
        told = re.search(r"^ten images: (.*)$", run.stdout, re.M)
        got = [int(one) for one in re.sub(r" \(is \d\)", "", told[1]).split()]
        right = sum(one == other for one, other in zip(got, LABELS))
        expect(len(got) == 10 and right >= 7 and told[1].count("(is") == 10 - right, told[0])
        made, = pathlib.Path(jobs).iterdir()
        model_says = classes_of(made / "model.tar.gz")
        expect(got == model_says, "the endpoint says", got, "the model", model_says)
        expect("test_accuracy" in (made / "report.html").read_text(), list(made.iterdir()))


run_cases([notebook_cell_runs_from_data_to_answers])
