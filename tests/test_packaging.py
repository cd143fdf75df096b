"""What is built and installed: wheel, sdist, extras, completion."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import smupar
from tests.support.release import problems, raise_to, relative_links, urls

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"plot", "data", "hf", "search", "ray", "eval", "lightning", "tracking", "docs", "all", "dev"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def _of_the_package() -> set[str]:
    files = (path for path in (ROOT / "smupar").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_holds_the_package_its_types_and_sources_and_no_tests(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"smupar-{smupar.__version__}.dist-info/METADATA").decode()
    assert metadata.startswith("Metadata-Version: 2.4\n")
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == _of_the_package()
    sources = {f"smupar/execute/sparse/{name}" for name in ("kernel.cpp", "bf16.cuh", "tiles.cu", "semi.cu")}
    page = {
        f"smupar/output/page/assets/{name}" for name in ("page.html", "page.css", "plotly-basic.min.js", "plotly-LICENSE.txt")
    }
    assert {"smupar/py.typed", *sources, *page} <= inside
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "smupar/output/page/assets/plotly-LICENSE.txt"}
    assert "\nLicense-Expression: Apache-2.0 AND MIT\n" in metadata
    assert set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE)) == EXTRAS


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git lists; an unpacked sdist has no git")
def test_sdist_holds_every_file_of_the_checkout_but_its_ci(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    assert {name for name in listed.stdout.splitlines() if not name.startswith(".ci/")} == names - {"PKG-INFO"}


def test_every_extra_that_is_named_exists():
    places = [*(ROOT / "smupar").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile"]
    named = {
        extra: path
        for path in places
        for names in re.findall(r"(?:pip install [^\n]*smupar\[|\boptional\([^\n]*, \")([\w,]+)[\]\"]", path.read_text())
        for extra in names.split(",")
    }
    assert {"plot", "search", "tracking", "hf", "data", "eval", "ray", "lightning"} <= named.keys()
    assert named.keys() <= EXTRAS, {extra: path for extra, path in named.items() if extra not in EXTRAS}


def test_every_dependency_says_who_uses_it_and_is_pinned():
    text = (ROOT / "pyproject.toml").read_text()
    listed = text[text.index("\ndependencies = [") : text.index("[project.urls]")]
    assert [line for line in listed.splitlines() if '"' in line and "#" not in line] == []
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    pinned |= set(re.findall(r"(\S+)==", (ROOT / "Makefile").read_text()))  # installed without their dependencies
    wanted = [
        *PROJECT["dependencies"],
        *(requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra),
    ]
    assert {re.split(r"[\[<>=]", requirement)[0].lower() for requirement in wanted} - {"smupar"} <= pinned


def test_version_says_what_is_installed_without_importing_it():
    code = "import sys; from smupar.cli.main import main; main(['--version']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, made_of, extras = done.stdout.splitlines()[:3]
    assert first == f"smupar {smupar.__version__}"
    assert re.match(r"Python 3\.\d+\.\d+, torch 2\.\d+\.\d+", made_of)
    assert {"data", "plot", "search", "tracking"} <= set(extras.removeprefix("extras: ").split(", "))


def test_bash_completes_commands_flags_and_steps(tmp_path):
    script = tmp_path / "smupar"
    written = subprocess.run([sys.executable, "-m", "smupar", "completion", "bash"], capture_output=True, text=True, check=True)
    script.write_text(written.stdout)
    words = [
        "tran",
        "train --wid",
        "data prep",
        "report --par",
        "train --dtype b",
        "bench spa",
        "transfer --rul",
        "train --no-t",
    ]
    lines = [
        f'COMP_WORDS=(smupar {typed}); COMP_CWORD={typed.count(" ") + 1}; _smupar; echo "${{COMPREPLY[*]}}"' for typed in words
    ]
    done = subprocess.run(["bash", "-c", "\n".join([f"source {script}", *lines])], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["transfer", "--width", "prepare", "--parquet", "bf16", "sparse", "--rules", "--no-tied"]
    assert "tyro" not in written.stdout


@pytest.mark.slow
def test_wheel_in_a_clean_environment_has_a_working_command(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # those of this environment, behind its own

    def run(*command):
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True).stdout

    assert str(packages) in run(python, "-c", "import smupar; print(smupar.__file__)")
    lean = run(python, "-c", "import sys, smupar; print(*sys.modules)").split()
    assert not {"torch", "numpy", "tqdm"} & set(lean)
    helped = "import sys\nfrom smupar.cli.main import main\nmain(['--help']); print(*sys.modules)"
    assert not {"torch", "numpy"} & set(run(python, "-c", helped).split())
    smupar_ = tmp_path / "venv" / "bin" / "smupar"
    assert "transfer" in run(smupar_, "--help")
    assert "eta / (m_in m_rho)" in run(smupar_, "rules")
    size = "--width 64 --depth 1 --steps 2 --seq-len 16 --sparsity 0.5 --out run"
    assert "validation loss" in run(smupar_, "train", *size.split())


# Releases


@pytest.fixture
def checkout(tmp_path):
    """A committed copy of the files that a release looks at, in the state in which 0.1.0 can be released."""
    for name in ("README.md", "CHANGELOG.md", "CITATION.cff", "smupar/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "README.md").write_text("[rules](https://example.org/rules.md)\n")
    (tmp_path / "smupar/__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-11-18)\n\n- First.\n")
    (tmp_path / "CITATION.cff").write_text("title: smupar\nversion: 0.1.0\ndate-released: 2026-11-18\nlicense: Apache-2.0\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_release_is_ready_when_all_files_agree(checkout):
    assert problems(checkout) == problems(checkout, "v0.1.0") == []


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("CHANGELOG.md", "## 0.1.0 (2026-11-18)", "## Unreleased", "CHANGELOG.md begins with '## Unreleased'"),
        ("CHANGELOG.md", "2026-11-18", "2026-11-19", "does not say 'date-released: 2026-11-19'"),
        ("CITATION.cff", "version: 0.1.0", "version: 0.0.9", "does not say 'version: 0.1.0'"),
        ("README.md", "https://example.org/rules.md", "docs/rules.md", "README.md links to 'docs/rules.md'"),
        ("README.md", "](", " is not on PyPI yet](", "README.md says 'not on PyPI yet', which a release makes untrue"),
    ],
)
def test_release_names_what_is_not_ready(checkout, name, old, new, said):
    path = checkout / name
    path.write_text(path.read_text().replace(old, new))
    first, last = problems(checkout)
    assert said in first
    assert last.startswith("there are changes that are not committed")


def test_raising_the_version_leaves_nothing_but_the_commit_to_do(checkout):
    changes = checkout / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## 0.1.0", "## Unreleased\n\n- Second.\n\n## 0.1.0"))
    raise_to(checkout, "0.2.0")
    assert "\n## 0.1.0 (2026-11-18)\n" in changes.read_text()
    (left,) = problems(checkout)
    assert left.startswith("there are changes that are not committed")
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md has no line '## Unreleased'"):
        raise_to(checkout, "0.3.0")
    assert '"0.2.0"' in (checkout / "smupar/__init__.py").read_text()
    with pytest.raises(SystemExit, match=r"'0\.3' is not a version such as 1\.2\.3"):
        raise_to(checkout, "0.3")


def test_release_refuses_another_tag_and_a_version_that_is_released(checkout):
    assert problems(checkout, "v0.2.0") == ["the tag is v0.2.0, and the version is 0.1.0: the tag should be v0.1.0"]
    subprocess.run(["git", "-C", str(checkout), "tag", "v0.1.0"], check=True)
    assert problems(checkout) == ["v0.1.0 is released already: raise __version__ in smupar/__init__.py"]


def test_links_of_the_readme_work_on_pypi_and_lead_to_files_that_exist():
    text, source = (ROOT / "README.md").read_text(), urls()["Source"]
    assert relative_links(text) == []
    inside = re.findall(rf"\]\({source}/(?:blob|tree|raw)/main/([^)#\s]+)", text)
    assert len(inside) > 10
    assert [name for name in inside if not (ROOT / name).exists()] == []


def test_addresses_are_those_of_the_project_wherever_they_are_named():
    source = urls()["Source"]
    assert f"repository-code: {source}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"{source}/security" in (ROOT / ".github/ISSUE_TEMPLATE/config.yml").read_text()


def test_workflows_test_the_pythons_and_the_oldest_torch_that_are_claimed():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    tried = workflow["jobs"]["claimed"]["strategy"]["matrix"]["include"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    pythons = {row["python"] for row in tried}
    assert oldest in pythons
    assert pythons == {f"3.{minor}" for minor in range(11, 11 + len(pythons))}
    (torch,) = [name for name in PROJECT["dependencies"] if name.startswith("torch")]
    assert f"{torch.removeprefix('torch>=')}.*" in {row["torch"] for row in tried}
    assert "" in {row["torch"] for row in tried}  # the newest
