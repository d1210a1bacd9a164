"""Create an environment for each peer: `telegrad bench peers`, or `telegrad bench peers ray grpc`.

No peer is a dependency of Telegrad. Each peer gets its own environment, which uses the torch of
this interpreter, in the folder `TELEGRAD_BENCH_PEERS` or in the user's cache. A peer that cannot be
installed is reported, and the others are still installed.
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
    "moolib": moolib_build.TOOLS,  # it is built from source with these tools
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
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    failed = False
    for peer in options.peers or PACKAGES:
        try:
            print(f"{peer}: {make(peer)}", flush=True)
        except (subprocess.CalledProcessError, ValueError) as error:
            failed = True
            print(f"{peer}: could not be installed and will be skipped: {error}", flush=True)
    return 1 if failed else 0


def make(peer: str) -> Path:
    """Install the peer in its environment and return the interpreter."""
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
    # Packages of the environment come first; torch and its dependencies are this interpreter's.
    Path(packages, "zz_torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    if uv:
        pip = [uv, "pip", "install", "--quiet", "--python", str(python)]
    else:
        pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *PACKAGES[peer]], check=True)
    if peer == "moolib":
        moolib_build.build(python)
    return python
