"""The source of a job from a repository: `git_config` of the SDK's estimators. Mistakes that the SDK finds are reported in its
words. git finds credentials itself (an SSH key, a credential helper): a document would store them in clear text."""
from __future__ import annotations

import os
import pathlib
import re
import subprocess
from typing import Any, Dict, List

from shoal.job.document import Job, JobError, distribution

KEYS = ("repo", "branch", "commit")
CREDENTIALS = ("2FA_enabled", "username", "password", "token")
CLONE_S = 600.0
# A repository cannot name a program to run, and git never asks for a password.
OF_GIT = {"GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh", "GIT_TERMINAL_PROMPT": "0"}


def config_check(config: Any) -> Dict[str, str]:
    """Returns the configuration if it has no mistake. Raises JobError; its text never contains a credential."""
    if not isinstance(config, dict):
        raise JobError(f"git_config: needs a table with repo, branch and commit, not {distribution.said(config)}")
    if "repo" not in config:
        raise JobError("Please provide a repo for git_config.")
    for key, value in config.items():
        if key in CREDENTIALS:
            if key == "2FA_enabled" and value is False:
                continue
            raise JobError(f"git_config: {key} is not taken: a job's folder would keep credentials in clear text. "
                           "Leave it out, and let git find them: an SSH key, or a credential helper")
        if key not in KEYS:
            raise JobError(f"git_config: unknown key {key}" + (
                distribution.names_like(str(key), KEYS) or f"; known: {', '.join(KEYS)}"))
        if not isinstance(value, str):
            raise JobError(f"'{key}' must be a string.")
        if not value or value.startswith("-"):
            raise JobError(f'git_config: {key} is "{value}", which names nothing')
    if re.match(r"https?://[^/]*@", config["repo"]) or re.match(r"ssh://[^/@]*:[^/@]*@", config["repo"]):
        raise JobError("git_config: repo holds credentials (USER:PASSWORD@): leave them out, and let git find them: "
                       "an SSH key, or a credential helper")
    return {key: config[key] for key in KEYS if key in config}


def clone(config: Any, folder: pathlib.Path) -> None:
    """Makes the folder: a clone of the repository at the branch and commit of the configuration. Raises JobError."""
    given = config_check(config)
    branch = ["--branch", given["branch"]] if "branch" in given else []
    _git(["clone", "--quiet", *branch, "--", os.path.expanduser(given["repo"]), str(folder)], f"clone {given['repo']}")
    if "commit" in given:
        _git(["-C", str(folder), "checkout", "--quiet", "--detach", given["commit"], "--"],
             f"check out commit {given['commit']} of {given['repo']}")


def _git(words: List[str], what: str) -> None:
    try:
        done = subprocess.run(["git", *words], env={**os.environ, **OF_GIT}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=CLONE_S)
    except FileNotFoundError:
        raise JobError("git_config: there is no program git on this machine: install it, or set source_dir") from None
    except subprocess.TimeoutExpired:
        raise JobError(f"git_config: cannot {what} within {CLONE_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        told = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1])
        raise JobError(f"git_config: cannot {what}: {told}")


def paths_into(job: Job, folder: pathlib.Path) -> None:
    """Makes source_dir (or else entry_point) and the dependencies, which are relative to the clone, absolute. Raises JobError
    for a path that does not exist or leads out of the clone."""
    if job.source_dir:
        source = _inside(folder, job.source_dir)
        if not source.is_dir():
            raise JobError("Source directory does not exist in the repo.")
        job.source_dir = str(source)
    entry_point = _inside(pathlib.Path(job.source_dir or folder), job.entry_point or "")
    if not entry_point.is_file():
        raise JobError("Entry point does not exist in the repo.")
    if not job.source_dir:
        job.entry_point = str(entry_point)
    for number, path in enumerate(job.dependencies):
        job.dependencies[number] = str(_inside(folder, path))
        if not os.path.exists(job.dependencies[number]):
            raise JobError(f"Dependency {path} does not exist in the repo.")


def _inside(folder: pathlib.Path, path: str) -> pathlib.Path:
    place = pathlib.Path(os.path.normpath(folder / path))
    if place != folder and folder not in place.parents:
        raise JobError(f"git_config: {path} leads out of the repository")
    return place


def paths_moved(job: Job, before: pathlib.Path, after: pathlib.Path) -> None:
    """Changes paths below one folder to paths below another, to which the files have moved."""
    def moved(path: str) -> str:
        return str(after / pathlib.Path(path).relative_to(before))

    if job.source_dir:
        job.source_dir = moved(job.source_dir)
    else:
        job.entry_point = moved(job.entry_point)
    job.dependencies = [moved(path) for path in job.dependencies]
