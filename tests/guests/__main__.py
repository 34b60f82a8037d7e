"""Install the guests into a separate environment, and run their tests there.

`python -m tests.guests --django 5.2` tests with the newest 5.2; by default pip chooses. The tests
run on the Python that runs this module, which needs no packages; Django 6 needs 3.12 or newer.
`--venv` keeps the environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Prints the tested versions.
VERSIONS = "import sys; from importlib.metadata import version; print(sys.version)" + (
    "; print(*(f'{each} {version(each)}' for each in sys.argv[1:]), sep=', ')"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guests", description=__doc__)
    parser.add_argument("--django", metavar="VERSION", help="such as 5.2 (default: the newest)")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keep the environment there")
    options = parser.parse_args()
    # The tests' PostgreSQL may run as another account.
    with tempfile.TemporaryDirectory(prefix="guests-") as place:
        where = (options.venv or Path(place)).resolve()
        if not (where / "bin").exists():
            venv.create(where, with_pip=True)
        python = where / "bin/python"
        wanted = ["-e", f"{ROOT}[guests]"]
        if options.django:
            wanted.append(f"django~={options.django}.0")
        pip = subprocess.run([python, "-m", "pip", "install", "-q", "--upgrade", *wanted])
        if pip.returncode:
            return pip.returncode
        names = ("django", "wagtail", "django-oscar", "django-debug-toolbar", "django-tasks")
        subprocess.run([python, "-c", VERSIONS, *names], check=True)
        command = [python, "-m", "pytest", "-n", "0", "-v", "tests/guests"]
        environment = {**os.environ, "GUESTS_REQUIRED": "1"}
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
