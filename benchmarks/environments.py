"""An environment for each peer: `telegrad bench peers`, or with names, `telegrad bench peers ray grpc`.

None of them is a dependency of Telegrad. Each gets an environment of its own that sees the torch of this interpreter,
in the folder `TELEGRAD_BENCH_PEERS` or in the user's cache. What does not install is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks import moolib_build
from benchmarks.peers import folder

PACKAGES = {
    "ray": ("ray",),
    "monarch": ("torchmonarch",),
    "grpc": ("grpcio",),
    "rpyc": ("rpyc",),
    "moolib": moolib_build.TOOLS,  # it is built from source with them
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="telegrad bench peers", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument(
        "peers", nargs="*", metavar="PEER", help=f"from {', '.join(PACKAGES)}; default: all"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.peers) - set(PACKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = False
    for peer in options.peers or PACKAGES:
        try:
            print(f"{peer}: {make(peer)}", flush=True)
        except (subprocess.CalledProcessError, ValueError) as error:
            failed = True
            print(f"{peer}: could not be installed and will be left out: {error}", flush=True)
    return 1 if failed else 0


def make(peer: str) -> Path:
    """The environment's interpreter, with the peer installed."""
    place, uv = folder() / peer, shutil.which("uv")
    python = place / "bin" / "python"
    with_uv = [
        uv or "",
        "venv",
        "--quiet",
        "--allow-existing",
        "--python",
        sys.executable,
        str(place),
    ]
    subprocess.run(with_uv if uv else [sys.executable, "-m", "venv", str(place)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    # Its own packages come first; torch, and what torch needs, are this interpreter's.
    Path(packages, "zz_torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    if uv:
        pip = [uv, "pip", "install", "--quiet", "--python", str(python)]
    else:
        pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *PACKAGES[peer]], check=True)
    if peer == "moolib":
        moolib_build.build(python)
    return python
