#!/usr/bin/env python3
"""Fetches scripts that others have published, into build/published. Tests run them as they are; they are no part of this project.

  dev/published.py              fetches all that are missing, from GitHub
  dev/published.py --from DIR   from a git repository on this machine that has their commits

Exit code 1 if one cannot be fetched."""
import argparse
import dataclasses
import pathlib
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

TOP = pathlib.Path(__file__).resolve().parent.parent
SECONDS_MAX = 30


@dataclasses.dataclass(frozen=True)
class Scripts:
    """Files of one folder at one commit."""
    repository: str
    commit: str
    folder: str
    files: tuple


PUBLISHED = {
    # Llama and GPT-NeoX for version 2 of SageMaker's model-parallel library (Apache-2.0). The folder's name begins with blanks.
    "tsm": Scripts("aws/amazon-sagemaker-examples", "2d519b52c3a2c2361f2b87f0d3de46fd6c0232a5",
                   "      build_and_train_models/sm-distributed_model_parallel_v2/shared-scripts",
                   ("arguments.py", "checkpoints.py", "data_utils.py", "fsdp_utils.py", "learning_rates.py", "logging_utils.py",
                    "memory_tracker.py", "train.py", "train_lib.py", "train_utils.py", "utils.py", "data/__init__.py", "data/utils.py",
                    "data/dataset/__init__.py", "data/dataset/dummy_dataset.py", "data/dataset/gpt_dataset.py",
                    "data/pipelines/__init__.py", "data/pipelines/data_pipeline.py", "data/pipelines/dummy_data_pipeline.py",
                    "data/pipelines/gpt_data_pipeline.py", "data/pipelines/hf_data_pipeline.py")),
}


def content(scripts, name, repository):
    """Returns the bytes of a file. repository: a git repository, or None for GitHub. Raises OSError."""
    path = f"{scripts.folder}/{name}"
    if repository:
        shown = subprocess.run(["git", "-C", repository, "show", f"{scripts.commit}:{path}"], capture_output=True)
        if shown.returncode:
            raise OSError(shown.stderr.decode(errors="replace").strip())
        return shown.stdout
    address = f"https://raw.githubusercontent.com/{scripts.repository}/{scripts.commit}/{urllib.parse.quote(path)}"
    with urllib.request.urlopen(address, timeout=SECONDS_MAX) as answer:
        return answer.read()


def fetch(name, repository):
    """Fetches one set of scripts. The folder appears when all of its files are there."""
    made = TOP / "build/published" / name
    if made.exists():
        return
    written = made.with_suffix(".part")
    for file in PUBLISHED[name].files:
        (written / file).parent.mkdir(parents=True, exist_ok=True)
        (written / file).write_bytes(content(PUBLISHED[name], file, repository))
    written.rename(made)
    print(f"fetched: {made}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="repository", metavar="DIR", help="a git repository instead of GitHub")
    repository = parser.parse_args().repository
    for name, scripts in PUBLISHED.items():
        try:
            fetch(name, repository)
        except OSError as error:
            sys.exit(f"dev/published.py: {scripts.repository} at {scripts.commit[:8]}: {error}")


if __name__ == "__main__":
    main()
