"""Build, check and tag a release: `make dist`, `make release VERSION=1.2.3`.

    scripts/release.py build                  build dist/, check it, install it into a new environment
    scripts/release.py tag 1.2.3              the same after checks of tree and changelog; then tag
    scripts/release.py tag 1.2.3 --dry-run    everything but the tag

Nothing is pushed. The workflow `release.yml` publishes a tag that is pushed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("telegrad/__init__.py", "telegrad/py.typed", "telegrad/examples/mnist.py")


class ReleaseError(Exception):
    """A check has failed; the message says which one and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--uv", default="uv", help="the program uv")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build and check the sdist and the wheel")
    tag = commands.add_parser("tag", help="check everything, build, tag")
    tag.add_argument("version")
    tag.add_argument("--dry-run", action="store_true", help="do everything except the tag")
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            build(options.uv)
        else:
            release(options.version, options.uv, dry_run=options.dry_run)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"release: failed with exit status {error.returncode}: {error.cmd}", file=sys.stderr)
        return 1
    return 0


def release(version: str, uv: str, *, dry_run: bool) -> None:
    check_tree(ROOT, version)
    check_version(ROOT, version)
    _run("make", "check")
    build(uv)
    if dry_run:
        print(f"v{version} could be tagged")
        return
    message = f"Telegrad {version}\n\n{notes((ROOT / 'CHANGELOG.md').read_text(), version)}\n"
    _run("git", "tag", "--annotate", "--cleanup=whitespace", f"v{version}", "--message", message)
    print(f"tagged; publish it with: git push origin v{version}")


def check_tree(root: Path, version: str) -> None:
    """Raise ReleaseError if something is not committed or the version is tagged already."""
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise ReleaseError(f"the tree is not clean; commit or remove:\n{changed}")
    if _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists; choose a new version")


def check_version(root: Path, version: str) -> None:
    """Raise ReleaseError unless the package has this version and the changelog describes it."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ReleaseError(f"{version!r} is not a version such as 1.2.3 or 1.2.3rc1")
    found = package_version(root)
    if found != version:
        raise ReleaseError(
            f"__version__ in src/telegrad/__init__.py is {found!r}, not {version!r}; change one of them"
        )
    if not changes((root / "CHANGELOG.md").read_text(), version):
        raise ReleaseError(
            f"CHANGELOG.md has no entries under '## {version}'; move those of '## Unreleased' there"
        )


def package_version(root: Path) -> str:
    found = re.search(
        r'^__version__ = "(.+)"$', (root / "src/telegrad/__init__.py").read_text(), re.MULTILINE
    )
    if found is None:
        raise ReleaseError("src/telegrad/__init__.py has no __version__")
    return found[1]


def changes(changelog: str, version: str) -> str:
    """Return what the changelog says about a version; its heading may have a date after the
    version.
    """
    section = re.search(
        rf"^## \[?{re.escape(version)}\]?( .*)?\n(?P<text>(?:(?!## ).*\n?)*)",
        changelog,
        re.MULTILINE,
    )
    return section["text"].strip() if section else ""


def notes(changelog: str, version: str) -> str:
    """Return the release notes: what the changelog says about the version before its lists."""
    return re.split(r"^### ", changes(changelog, version), maxsplit=1, flags=re.MULTILINE)[
        0
    ].strip()


def build(uv: str) -> None:
    """Build dist/ and check it: metadata, contents, and that a fresh environment can use the
    wheel.
    """
    folder = ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    _run(uv, "build", "--quiet", "--out-dir", folder)
    sdist, wheel = *folder.glob("*.tar.gz"), *folder.glob("*.whl")
    _run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    check_contents(wheel)
    try_wheel(wheel, package_version(ROOT), uv)
    print(f"built {sdist.name} and {wheel.name}")


def check_contents(wheel: Path) -> None:
    """Raise ReleaseError unless the wheel has what users need and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = sorted(set(NEEDED) - set(names))
    if missing:
        raise ReleaseError(f"{wheel.name} lacks {missing}")
    strange = [
        name
        for name in names
        if not re.match(r"telegrad(-[^/]+\.dist-info)?/", name)
        or re.search(r"/(benchmarks|tests|__pycache__)/", name)
    ]
    if strange:
        raise ReleaseError(f"{wheel.name} has files that are not for users: {strange}")


def try_wheel(wheel: Path, version: str, uv: str) -> None:
    """Install the wheel into a fresh environment, outside of the checkout, and use it there."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        _run(uv, "venv", "--quiet", "--python", sys.executable, python.parents[1])
        _run(uv, "pip", "install", "--quiet", "--python", python, wheel)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program = (
            "import sys, telegrad; assert telegrad.__version__ == sys.argv[1], telegrad.__version__"
        )
        _run(python, "-c", program, version, cwd=folder, env=environment)
        _run(
            python.with_name("telegrad"),
            "--help",
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
        )


def _run(*command: str | Path, **options: object) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, **{"cwd": ROOT, **options})  # type: ignore[call-overload]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
