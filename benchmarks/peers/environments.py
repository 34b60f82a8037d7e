"""Installs each peer once, in its own directory outside the repository.

`MQ_BENCH_PEERS` names the directory; without it, it is `django_mq-benchmarks` in the user's cache.
A directory belongs to one list of versions and one interpreter: new versions are a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: Written last: a directory without it was not installed completely.
DONE = "installed"


class Absent(Exception):
    """This peer cannot be measured here; the text says why."""


def command(name: str, driver: str) -> list[str]:
    """Return what starts the peer's driver in its environment, which is made if it is missing.

    Raises Absent when that is impossible.
    """
    wanted = tomllib.loads((HERE / "versions.toml").read_text())[name]
    path = HERE / "drivers" / driver
    if "npm" in wanted:
        node = _program("node")
        return [node, str(path), str(_made(name, wanted, _with_npm))]
    return [str(_made(name, wanted, _with_pip) / "bin" / "python"), str(path)]


def _made(name: str, wanted: dict[str, Any], install: Any) -> Path:
    identity = json.dumps([sys.version_info[:2], sys.prefix, wanted])
    directory = _home() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not (directory / DONE).exists():
        sys.stderr.write(f"peers: installing {name}\n")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        install(directory, wanted)
        (directory / DONE).touch()
    return directory


def _home() -> Path:
    if chosen := os.environ.get("MQ_BENCH_PEERS"):
        return Path(chosen).resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "django_mq-benchmarks"


def _with_pip(directory: Path, wanted: dict[str, Any]) -> None:
    least = tuple(map(int, wanted.get("python", "3").split(".")))
    if sys.version_info[:2] >= least:
        venv.create(directory, with_pip=True)
    else:  # `PATH` must have it
        _say([_program(f"python{wanted['python']}"), "-m", "venv", str(directory)])
    _say([str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted["pip"]])


def _with_npm(directory: Path, wanted: dict[str, list[str]]) -> None:
    options = ["--no-audit", "--no-fund", "--ignore-scripts"]
    _say([_program("npm"), "install", "--prefix", str(directory), *options, *wanted["npm"]])


def _program(name: str) -> str:
    found = shutil.which(name)
    if not found:
        raise Absent(f"no {name}")
    return found


def _say(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise Absent(f"not installed: {lines[-1]}")
