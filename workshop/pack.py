"""The workshop pack: all that a room needs, installable with the network cut. ``make pack``.

Into ``_build/pack`` go the rendered book, its PDF, the notebooks, both editions of the exercises,
slides, and a wheelhouse for machines like this one (Python, system), with torch for the CPU. Then
it is tried: installed into an empty home without a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from moebook import errors, storage
from moebook.errors import Refusal, refuse
from moebook.lab.run.sources import size
from moebook.storage import folders
from workshop import editions, pdf, slides

README = """# moebook, workshop pack

Nothing here needs a network. For {python} on {system}: `sh install.sh`, which makes moebook-venv/
beside it, then `moebook-venv/bin/moebook doctor` and `moebook-venv/bin/jupyter lab exercises`.

- html/index.html: the book; moebook.pdf: all its pages, to print
- slides/: a deck for each paper
- exercises/student, exercises/instructor: notebooks
- notebooks/: the notebooks of the book and their protocols
"""
INSTALL = """#!/bin/sh
# sh install.sh [folder of the environment]; PYTHON names another interpreter.
set -e
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/moebook-venv}
"${PYTHON:-python3}" -m venv "$venv"
install() {
  "$venv/bin/pip" install -q --disable-pip-version-check \\
    --no-index --find-links "$here/wheelhouse" "$@"
}
install moebook jupyterlab
install --no-deps -r "$here/requirements.nodeps.lock"
"""
TRIAL = """set -e
sh "$PACK/install.sh" "$HOME/venv"
cd "$HOME"
venv/bin/moebook doctor
venv/bin/moebook run routing --on smoke
venv/bin/jupyter lab --version
"""
# A network without so much as a loopback.
OFFLINE = ["unshare", "--map-root-user", "--net"]


def main(folder: Path) -> Path:
    """Make the pack, try it, print the size of each part; until then the old one stays."""
    html = folder / "_build" / "html"
    pack = folder / "_build" / ".pack.new"
    if shutil.which(OFFLINE[0]) is None:
        what = f"the pack is tried without a network, by {OFFLINE[0]} (util-linux)"
        refuse("E-DEP", f"{what}, which is not installed")
    if not (html / "index.html").is_file():
        refuse("E-BOOK", f"no book in {html}; run: make book")
    shutil.rmtree(pack, ignore_errors=True)
    shutil.copytree(html, pack / "html")
    shutil.copytree(folder / "notebooks", pack / "notebooks")
    editions.write(pack / "exercises")
    slides.write(pack / "slides", folder)
    pdf.write(pack / "moebook.pdf", folder)
    wheels(folder, pack / "wheelhouse")
    shutil.copy(folder / "requirements.nodeps.lock", pack)
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    (pack / "install.sh").write_text(INSTALL, encoding="utf-8")
    (pack / "README.md").write_text(
        README.format(python=python, system=os.uname().sysname)
    )
    for part in sorted(pack.iterdir()):
        files = [path for path in (part, *part.rglob("*")) if path.is_file()]
        total = sum(path.stat().st_size for path in files)
        print(f"{size(total):>8}  {part.name}", flush=True)
    attempt(pack)
    made = pack.with_name("pack")
    folders.mend(made)
    folders.put(pack, made)
    return made


def wheels(folder: Path, target: Path) -> None:
    """Fill the wheelhouse by the locks; torch must be built for the CPU."""
    # A build before left there what has gone since, and the wheel would hold it.
    shutil.rmtree(folder / "build", ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    locked = folder / "requirements.lock"
    _run([*pip, "wheel", "-w", str(target), "-r", str(locked)], "the wheelhouse")
    apart = ["-r", str(folder / "requirements.nodeps.lock"), str(folder)]
    _run([*pip, "wheel", "--no-deps", "-w", str(target), *apart], "the wheelhouse")
    _run(
        [*pip, "wheel", "-w", str(target), "-c", str(locked), "jupyterlab"],
        "the wheelhouse",
    )
    heavy = sorted(path.name for path in target.glob("nvidia*"))
    if heavy:
        refuse(
            "E-DEP",
            f"pip chose a torch for GPUs, which brings {len(heavy)} packages such as "
            f"{heavy[0]}; set PIP_INDEX_URL to an index with builds for the CPU",
        )


def attempt(pack: Path) -> None:
    """Install the pack into an empty home with the network cut, and run its smoke test."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "HOME": home,
            "PATH": os.environ["PATH"],
            "PACK": str(pack),
            "LANG": "C.UTF-8",
        }
        command = [*OFFLINE, "bash", "-c", TRIAL]
        print(_run(command, "the trial of the pack", env=environment, cwd=home), end="")


def _run(command: list[str], what: str, **how: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload]
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        refuse("E-DEP", f"{what} failed: {lines[-1]}")
    return str(done.stdout)


if __name__ == "__main__":
    try:
        print(f"pack: {main(storage.checkout())}")
    except (Refusal, OSError) as error:
        print(errors.told(error), file=sys.stderr)
        sys.exit(2)
