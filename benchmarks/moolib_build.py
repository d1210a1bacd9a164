"""Build the last release of moolib for the torch of an environment.

Its source needs an old pybind11 and an old C++ standard. The build uses a current pybind11, C++20
for files that include headers of torch, torch without its CMake configuration (which requires the
CUDA toolkit), and one rewritten template.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

__all__ = ["TOOLS", "build"]

# newer setuptools have no distutils.spawn
TOOLS = ("pip", "setuptools<75", "wheel", "pybind11", "cmake", "ninja")
RELEASE = "moolib==0.0.9b0"

_CMAKE = {
    "find_package(Torch REQUIRED)": """
set(TORCH_INCLUDE_DIRS ${TorchPath}/include;${TorchPath}/include/torch/csrc/api/include)
set(TORCH_LIBRARIES
${TorchPath}/lib/libtorch.so;${TorchPath}/lib/libtorch_cpu.so;${TorchPath}/lib/libc10.so)
""",
    "add_subdirectory(third_party/pybind11)": """
execute_process(COMMAND python -c "import sys; print(sys.executable, end='')" OUTPUT_VARIABLE
Python_EXECUTABLE)
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 CONFIG REQUIRED)
""",
    'COMPILE_FLAGS "${TORCH_CXX_FLAGS}")': """COMPILE_FLAGS "-std=gnu++20")
set_target_properties(tensor PROPERTIES CXX_STANDARD 20)""",
}
_TEMPLATE = {
    "template<typename T>\nstruct RpcDeferredReturn {": """
template<typename T> struct RpcReturns { using type = void(const T&); };
template<> struct RpcReturns<void> { using type = void(); };
template<typename T>
struct RpcDeferredReturn {""",
    "std::conditional_t<std::is_same_v<void, T>, void(), void(const T&)>> f;": "typename RpcReturns<T>::type> f;",
}


def build(python: Path) -> None:
    """Build moolib into the environment of this interpreter, which has the `TOOLS`."""
    with tempfile.TemporaryDirectory(prefix="moolib-") as folder:
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        fetch = [
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--dest",
            folder,
        ]
        subprocess.run([*pip, *fetch, RELEASE], check=True)
        (archive,) = Path(folder).glob("moolib-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        source = Path(folder, archive.name.removesuffix(".tar.gz"))
        rewrite(source / "CMakeLists.txt", _CMAKE)
        rewrite(source / "src" / "rpc.h", _TEMPLATE)
        install = ["install", "--quiet", "--no-deps", "--no-build-isolation", str(source)]
        subprocess.run([*pip, *install], check=True, env=environment(python))


def rewrite(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        if old not in text:
            raise ValueError(
                f"{path.name} differs from the version that is expected here: it has no {old!r}"
            )
        text = text.replace(old, new)
    path.write_text(text)


def environment(python: Path) -> dict[str, str]:
    code = "import pybind11; print(pybind11.get_cmake_dir())"
    where = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "USE_CUDA": "0",
        "pybind11_DIR": where,
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
