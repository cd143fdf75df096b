"""Says what keeps a version from being released. `make release` runs it after the tests, on the packages that it has built."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from datetime import date
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNRELEASED = "is not on PyPI yet"  # the words of README that a release makes untrue


def version() -> str:
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "smupar/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)[1]


def texts(root: Path, number: str) -> list[str]:
    """What is wrong with changelog, citation and README."""
    wrong = []
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(rf"^## {re.escape(number)} \((\d{{4}}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    if not heading:
        wrong.append(f"CHANGELOG.md: write the heading '## {number} ({date.today()})' over what is new")
    elif date.fromisoformat(heading[1]) > date.today():
        wrong.append(f"CHANGELOG.md: {number} is dated {heading[1]}, which is not yet")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    cited = re.search(r"^version: (\S+)$", citation, re.MULTILINE)
    if not cited or cited[1] != number:
        wrong.append(f"CITATION.cff: the version is {cited[1] if cited else 'missing'}, and smupar's is {number}")
    if heading and not re.search(rf"^date-released: [\"']?{heading[1]}[\"']?$", citation, re.MULTILINE):
        wrong.append(f"CITATION.cff: write date-released: {heading[1]}")
    if UNRELEASED in (root / "README.md").read_text(encoding="utf-8"):
        wrong.append(f"README.md: take out that the version {UNRELEASED}")
    return wrong


def packages(folder: Path, number: str) -> list[str]:
    """What is wrong with the wheel and the sdist."""
    wheel, sdist = folder / f"smupar-{number}-py3-none-any.whl", folder / f"smupar-{number}.tar.gz"
    found = sorted(path.name for path in folder.iterdir())
    if found != sorted([wheel.name, sdist.name]):
        return [f"{folder} holds {', '.join(found)}, and not {wheel.name} and {sdist.name}"]
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"smupar-{number}.dist-info/METADATA"))
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wrong = [f"{sdist.name}: {name} is missing" for name in ("LICENSE", "CHANGELOG.md", "pyproject.toml") if name not in names]
    relative = re.findall(r"\]\((?!https://)[^)]+\)", metadata.get_payload())
    wrong += [f"README.md: {link[1:]} leads nowhere on PyPI" for link in relative]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    if len(metadata.get_all("Project-URL", [])) != len(urls):
        wrong.append(f"{wheel.name}: project URLs are missing")
    return wrong


def repository(number: str) -> list[str]:
    """What is wrong with the state of the repository."""
    git = ["git", "-C", str(ROOT)]
    wrong = []
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout:
        wrong.append("there are changes that are not committed")
    tagged = subprocess.run([*git, "tag", "--points-at", f"v{number}"], capture_output=True, text=True, check=False)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD", f"v{number}^{{}}"], capture_output=True, text=True, check=False
    ).stdout.split()
    if tagged.returncode == 0 and len(set(head)) > 1:
        wrong.append(f"the tag v{number} is on another commit: raise __version__ in smupar/__init__.py")
    return wrong


def main() -> int:
    number = version()
    wrong = [*texts(ROOT, number), *packages(Path(sys.argv[1]), number), *repository(number)]
    for line in wrong:
        print(line)
    print(f"smupar {number} " + ("is not ready" if wrong else f"is ready: git tag v{number} && git push origin v{number}"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
