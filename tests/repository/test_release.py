"""What is published, and what `make release` refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2030-01-02\n\n### Added\n\n- Something.\n\n## 1.2.2\n"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository in which version 1.2.3 can be released."""
    package = tmp_path / "src/telegrad"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "Begin")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_version_can_be_released(release: ModuleType, repository: Path) -> None:
    release.check_tree(repository, "1.2.3")
    release.check_version(repository, "1.2.3")


def test_what_is_not_committed_is_not_released(release: ModuleType, repository: Path) -> None:
    (repository / "new.py").touch()
    with pytest.raises(release.ReleaseError, match=r"(?s)not clean.*new\.py"):
        release.check_tree(repository, "1.2.3")


def test_a_tag_is_made_once(release: ModuleType, repository: Path) -> None:
    git(repository, "tag", "v1.2.3")
    with pytest.raises(release.ReleaseError, match=r"v1\.2\.3 exists"):
        release.check_tree(repository, "1.2.3")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.2", "is not a version"),
        ("v1.2.3", "is not a version"),
        ("1.2.4", "__version__ .* is '1.2.3', not '1.2.4'"),
    ],
)
def test_the_version_is_that_of_the_package(
    release: ModuleType, repository: Path, version: str, message: str
) -> None:
    with pytest.raises(release.ReleaseError, match=message):
        release.check_version(repository, version)


def test_the_changelog_describes_the_version(release: ModuleType, repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text(CHANGELOG.replace("1.2.3", "1.2.1"))
    with pytest.raises(
        release.ReleaseError, match=r"CHANGELOG\.md has no entries under '## 1\.2\.3'"
    ):
        release.check_version(repository, "1.2.3")


@pytest.mark.parametrize(
    ("version", "text"),
    [("1.2.3", "### Added\n\n- Something."), ("1.2.2", ""), ("1.2", ""), ("Unreleased", "")],
)
def test_changes_of_a_version(release: ModuleType, version: str, text: str) -> None:
    assert release.changes(CHANGELOG, version) == text


def test_a_tag_has_the_notes_of_its_version(release: ModuleType) -> None:
    text = CHANGELOG.replace("### Added", "The notes.\n\n### Added")
    assert release.notes(text, "1.2.3") == "The notes."
    assert release.notes(CHANGELOG, "1.2.3") == ""


def test_this_version_can_be_tagged(release: ModuleType) -> None:
    """The changelog has notes about the version of the package."""
    version, text = release.package_version(ROOT), (ROOT / "CHANGELOG.md").read_text()
    assert release.notes(text, version)


def test_the_wheel_has_what_users_need_and_nothing_else(release: ModuleType, wheel: Path) -> None:
    release.check_contents(wheel)


@pytest.mark.parametrize(
    "name", ["telegrad/bench/benchmarks/ps.py", "tests/conftest.py", "benchmarks/ps.py"]
)
def test_a_wheel_with_other_files_is_refused(
    release: ModuleType, tmp_path: Path, name: str
) -> None:
    wheel = tmp_path / "telegrad-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for needed in (*release.NEEDED, name):
            archive.writestr(needed, "")
    with pytest.raises(release.ReleaseError, match=name):
        release.check_contents(wheel)
