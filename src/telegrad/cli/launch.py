"""`telegrad launch ... script.py`: start the workers of a program, on this host or a cluster."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telegrad.cli.help_text import HelpFormatter
from telegrad.errors import UsageError
from telegrad.launcher import kubernetes, slurm

_INTERRUPTED = 130  # the exit code that shells give a command that Ctrl-C has ended

_EXAMPLES = """\
  telegrad launch -n 3 train.py --epochs 3                      worker0, worker1 and worker2
  telegrad launch --role ps=1 --role trainer=4 train.py         ps0, trainer0, ..., trainer3
  telegrad launch -n 3 --restarts 2 -m project.train            a module; restart what fails
  telegrad launch -n 2 -m telegrad run old.py                   a torch.distributed.rpc script
  telegrad launch -n 3 --dashboard train.py                     show them on a web page
  telegrad launch -n 8 --on slurm --sbatch=--partition=gpu train.py
  telegrad launch -n 8 --on k8s --image example/train train.py \\
      | kubectl apply -f -

In each worker, `init_rpc` and `Agent` need no arguments.
"""


def add(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "launch",
        help="start the workers of a program",
        description="Start the workers of a program, show and keep their output, and restart those "
        "that fail. The exit code is that of the first worker that fails for good.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="number of workers")
    parser.add_argument(
        "--role",
        dest="roles",
        action="append",
        type=_role,
        default=[],
        metavar="NAME=N",
        help="N workers of a role, named NAME0, NAME1, ...; may be repeated",
    )
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="restart a worker that fails, under the same name, up to N times (default: 0)",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the output here (default: a new folder)"
    )
    parser.add_argument(
        "--dashboard",
        action="store_true",
        help="show the workers on a web page of this host; TELEGRAD_DASHBOARD=1 or =PORT does the "
        "same",
    )
    parser.add_argument(
        "--on",
        choices=["local", "slurm", "k8s", "ray"],
        default="local",
        help="where: on this host (default); submit a Slurm job; print a Kubernetes manifest; "
        "in actors of the Ray cluster at RAY_ADDRESS",
    )
    parser.add_argument("--name", help="name of the job (default: that of the program)")
    parser.add_argument("--gpus", type=_count, default=0, metavar="N", help="GPUs of each worker")
    parser.add_argument(
        "--dry-run", action="store_true", help="slurm: print the script, do not submit it"
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="slurm: an option of sbatch, as in --sbatch=--partition=gpu; may be repeated",
    )
    parser.add_argument("--image", help="k8s: an image with the program and Telegrad")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is the name of a module"
    )
    parser.add_argument("program", metavar="PROGRAM", help="a script")
    rest = parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program"
    )
    rest.required = False  # an error about a missing argument does not name it
    parser.set_defaults(command=lambda options: _launch(parser, options))


def _role(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not name or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N")
    return name, int(size)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _launch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if (options.workers is None) == (not options.roles):
        parser.error("give the number of workers: either -n N or --role NAME=N")
    if not options.module and options.on != "k8s" and not Path(options.program).exists():
        parser.error(f"cannot launch {options.program!r}: there is no such file")
    for option, engines in _OPTIONS_OF_ENGINES.items():
        if getattr(options, option) and options.on not in engines:
            where = " or ".join(f"--on {engine}" for engine in engines)
            parser.error(f"--{option.replace('_', '-')} needs {where}")
    if options.dashboard:
        if options.on != "local":
            parser.error(
                f"--dashboard shows workers on this host; with --on {options.on}, run "
                "`telegrad dashboard --rendezvous HOST:PORT` on a host of the job"
            )
        if os.environ.get("TELEGRAD_DASHBOARD", "0") in ("", "0"):
            os.environ["TELEGRAD_DASHBOARD"] = "1"
    options.roles = dict(options.roles) or {"worker": options.workers}
    program = ["-m", options.program] if options.module else [options.program]
    options.name = options.name or _name(options.program)
    try:
        return _ENGINES[options.on]([*program, *options.args], options)
    except UsageError as error:
        parser.error(str(error))


def _on_this_host(command: Sequence[str], options: argparse.Namespace) -> int:
    folder = options.logs or Path(tempfile.mkdtemp(prefix="telegrad-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write into --logs {folder}: {error.strerror}") from None
    scripts = importlib.import_module("telegrad.launcher.scripts")  # it imports torch
    exit_code: int = scripts.run_script(command, options.roles, options.restarts, folder)
    return exit_code


def _on_slurm(command: Sequence[str], options: argparse.Namespace) -> int:
    logs = (options.logs or Path()).absolute()
    script = slurm.batch_script(
        command,
        options.roles,
        name=options.name,
        restarts=options.restarts,
        logs=logs,
        gpus=options.gpus,
        options=options.sbatch,
    )
    if options.dry_run:
        sys.stdout.write(script)
        return 0
    logs.mkdir(parents=True, exist_ok=True)
    secret = os.environ.get("TELEGRAD_SECRET") or secrets.token_hex(32)
    said = slurm.submit(script, {**os.environ, "TELEGRAD_SECRET": secret})
    sys.stdout.write(f"{said}\noutput in {logs}\n")
    return 0


def _on_kubernetes(command: Sequence[str], options: argparse.Namespace) -> int:
    if not options.image:
        raise UsageError("--on k8s needs --image, an image with your program and Telegrad")
    text = kubernetes.manifest(
        command,
        options.roles,
        name=options.name,
        image=options.image,
        secret=os.environ.get("TELEGRAD_SECRET") or secrets.token_hex(32),
        restarts=options.restarts,
        gpus=options.gpus,
    )
    sys.stdout.write(text)
    return 0


def _on_ray(command: Sequence[str], options: argparse.Namespace) -> int:
    actors = importlib.import_module("telegrad.launcher.ray_actors")  # it imports torch and Ray
    try:
        exit_code: int = actors.run_on_ray(
            command, options.roles, restarts=options.restarts, gpus=options.gpus
        )
    except KeyboardInterrupt:
        return _INTERRUPTED
    return exit_code


_ENGINES = {
    "local": _on_this_host,
    "slurm": _on_slurm,
    "k8s": _on_kubernetes,
    "ray": _on_ray,
}


# By option: the engines that use it.
_OPTIONS_OF_ENGINES = {
    "dry_run": ["slurm"],
    "sbatch": ["slurm"],
    "image": ["k8s"],
    "gpus": ["slurm", "k8s", "ray"],
}


def _name(program: str) -> str:
    """Return a name for the job that Kubernetes accepts, too."""
    stem = program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:50] or "telegrad"
