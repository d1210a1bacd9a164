"""`telegrad run`: a program runs as with Python, and torch's names are Telegrad's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

import telegrad
import telegrad.cli

TELL = """
import sys
import torch.distributed.rpc as rpc
SPEC_NAME = getattr(__spec__, "name", None)
TOLD = [__name__, sys.argv, sys.path[0], __file__, rpc.__name__, SPEC_NAME, __package__]
"""


def told(*arguments: str) -> list[Any]:
    assert telegrad.cli.main(["run", *arguments]) == 0
    found: list[Any] = sys.modules["__main__"].TOLD
    return found


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return path


@pytest.mark.usefixtures("own_main")
def test_a_script(tmp_path: Path) -> None:
    script = str(write(tmp_path / "script.py", TELL))
    arguments = ["-m", "--version", "--", "x"]
    assert told(script, *arguments) == [
        "__main__",
        [script, *arguments],
        str(tmp_path),
        script,
        "telegrad.rpc",
        None,
        None,
    ]


def test_a_script_by_a_relative_path_and_through_a_link(
    tmp_path: Path, own_main: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "real" / "script.py", TELL)
    (tmp_path / "link.py").symlink_to("real/script.py")
    own_main.chdir(tmp_path)
    name, argv, first, file, *_ = told("link.py")
    assert (name, argv) == ("__main__", ["link.py"])
    assert first == str(tmp_path / "real")
    assert file == str(tmp_path / "link.py")


def test_a_module_and_a_package(tmp_path: Path, own_main: pytest.MonkeyPatch) -> None:
    write(tmp_path / "project_of_a_test" / "__init__.py", "import torch.distributed.rpc as early")
    train = str(write(tmp_path / "project_of_a_test" / "train.py", TELL))
    main = str(write(tmp_path / "project_of_a_test" / "__main__.py", TELL))
    own_main.chdir(tmp_path)
    package = "project_of_a_test"
    where = [str(tmp_path), train, "telegrad.rpc", f"{package}.train", package]
    assert told("-m", f"{package}.train", "7") == ["__main__", [train, "7"], *where]
    assert told("-m", package)[1:6] == [
        [main],
        str(tmp_path),
        main,
        "telegrad.rpc",
        f"{package}.__main__",
    ]
    assert sys.modules.pop(package).early is telegrad.rpc


@pytest.mark.usefixtures("own_main")
def test_a_folder_and_a_zip_file(tmp_path: Path) -> None:
    main = write(tmp_path / "folder" / "__main__.py", TELL)
    archive = str(tmp_path / "packed.zip")
    with zipfile.ZipFile(archive, "w") as file:
        file.write(main, "__main__.py")
    for path in (str(tmp_path / "folder"), archive):
        name, argv, first, location, *_ = told(path, "1")
        assert (name, argv, first) == ("__main__", [path, "1"], path)
        assert location == os.path.join(path, "__main__.py")


@pytest.mark.usefixtures("own_main")
def test_the_module_outlives_its_program(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py", "value = 3\ndef later():\n    return value\nTOLD = [later]"
    )
    (later,) = told(str(script))
    assert later() == 3


@pytest.mark.usefixtures("own_main")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py"], "cannot run 'nowhere.py': there is no such file"),
        (["-m", "nowhere.at_all"], "cannot run 'nowhere.at_all': there is no such module"),
        (["-m", "torch.nowhere"], "cannot run 'torch.nowhere': there is no such module"),
        (["."], "cannot run '.': it is a folder without a __main__.py"),
        (["-m", "_struct"], "cannot run '_struct': it is not made of Python code"),
        ([], "the following arguments are required: PROGRAM"),
    ],
)
def test_what_cannot_be_run(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        telegrad.cli.main(["run", *arguments])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_module_that_imports_what_is_not_there_says_so(
    tmp_path: Path, own_main: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "broken_of_a_test" / "__init__.py", "import not_installed_anywhere")
    own_main.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        telegrad.cli.main(["run", "-m", "broken_of_a_test"])


@pytest.mark.usefixtures("own_main")
@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (
            "def f():\n    1 / 0\nf()",
            ["Traceback (most recent call last):", '  File "{script}", line 3, in <module>'],
        ),
        ("x = = 1", ['  File "{script}", line 1', "    x = = 1"]),
    ],
)
def test_a_traceback_begins_in_the_program(
    tmp_path: Path, code: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path / "script.py", code)
    with pytest.raises((ZeroDivisionError, SyntaxError)) as raised:
        telegrad.cli.main(["run", str(script)])
    sys.excepthook(raised.type, raised.value, raised.value.__traceback__)
    assert capsys.readouterr().err.splitlines()[:2] == [
        line.format(script=script) for line in lines
    ]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        telegrad.cli.main(["--version"])
    assert capsys.readouterr().out == f"telegrad {telegrad.__version__}\n"


# A program without Telegrad. Rank 0 is the program itself; the others are forked, spawned, and
# forked from a server.
PROGRAM = """
import multiprocessing
import sys

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef


def trap(self, *args, **kwargs):
    raise AssertionError("torch's own engine was used")


# torch's agent cannot start without these options
torch._C._distributed_rpc._TensorPipeRpcBackendOptionsBase.__init__ = trap


def join(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=4, rpc_backend_options=options)


def work(index, rank, store):
    join(rank + index, store)
    rpc.shutdown()


def describe(rref):
    name, total = rpc.get_worker_info().name, rref.to_here().sum().item()
    return f"{name} {rpc.__name__} {RRef.__module__} {total}"


if __name__ == "__main__":
    store = sys.argv[1]
    children = [multiprocessing.get_context(start).Process(target=work, args=(0, rank, store))
                for start, rank in (("fork", 1), ("forkserver", 2))]
    for child in children:
        child.start()
    spawned = mp.spawn(work, args=(3, store), nprocs=1, join=False)
    join(0, store)
    numbers = RRef(torch.ones(2))
    for rank in range(1, 4):
        print(rpc.rpc_sync(f"w{rank}", describe, args=(numbers,)))
    del numbers
    rpc.shutdown()
    spawned.join()
    for child in children:
        child.join()
    print([child.exitcode for child in children])
    raise KeyError("the end")
"""


@pytest.mark.process
def test_an_unmodified_program_with_children_of_every_kind(tmp_path: Path) -> None:
    script = write(tmp_path / "program.py", PROGRAM)
    source = str(Path(telegrad.__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", "run", str(script), str(tmp_path / "store")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.splitlines() == [
        *(f"w{rank} telegrad.rpc telegrad.refs.rref 2.0" for rank in range(1, 4)),
        "[0, 0]",
    ], done.stderr
    assert done.returncode == 1
    assert done.stderr.splitlines()[-4:-2] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line {PROGRAM.count(chr(10))}, in <module>',
    ]
    assert done.stderr.splitlines()[-1] == "KeyError: 'the end'"
