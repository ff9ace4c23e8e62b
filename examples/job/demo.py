#!/usr/bin/env python3
"""Runs notebook_cell.py with everything that it needs on this machine: starts an S3 server (moto's, on a free port), stores
Fashion-MNIST there, runs the cell, and writes the report page. `make demo-job` runs this program."""
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import boto3
from moto.server import ThreadedMotoServer

HERE = pathlib.Path(__file__).resolve().parent
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
KEYS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_DEFAULT_REGION": "us-east-1"}


def bucket_fill(endpoint):
    s3 = boto3.client("s3", endpoint_url=endpoint)
    s3.create_bucket(Bucket="shoal-demo")
    for path in sorted(DATA.glob("*.gz")):
        channel = "train" if path.name.startswith("train") else "test"
        s3.upload_file(str(path), "shoal-demo", f"{channel}/{path.name}")


def main():
    if not DATA.is_dir():
        sys.exit(f"demo.py: no {DATA}: run `apt install dataset-fashion-mnist`")
    begun = time.monotonic()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # do not log each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    os.environ.update(KEYS, AWS_ENDPOINT_URL_S3=endpoint)
    os.environ.setdefault("SHOAL_JOBS", tempfile.mkdtemp(prefix="shoal-demo-"))
    bucket_fill(endpoint)
    print(f"S3 at {endpoint}, jobs in {os.environ['SHOAL_JOBS']}", flush=True)
    print("the workers' first line comes after about ten seconds", flush=True)
    code = subprocess.run([sys.executable, str(HERE / "notebook_cell.py")]).returncode
    server.stop()
    jobs = sorted(pathlib.Path(os.environ["SHOAL_JOBS"]).iterdir())
    if jobs:
        print("report: ", end="", flush=True)
        subprocess.run([sys.executable, "-m", "shoal.job", "report", jobs[-1].name, "-o", str(jobs[-1] / "report.html")], check=True)
    print(f"{time.monotonic() - begun:.0f} s in all")
    sys.exit(code)


if __name__ == "__main__":
    main()
