"""Is this checkout ready for a release? ``python tests/support/release.py`` prints what is wrong and exits with 1.

`make release` runs this with the tests and the site before a tag is made; the release workflow runs it again for the tag.
``python tests/support/release.py --raise-to 1.2.3`` writes the version and today's date to all files that name them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HEADING = re.compile(r"^## (?P<version>\S+)(?: \((?P<date>\d{4}-\d{2}-\d{2})\))?$", re.MULTILINE)


def problems(root: Path, tag: str | None = None) -> list[str]:
    """Sentences on what is not ready. Where ``tag`` is None, the tag of this version must not exist yet."""
    read = lambda name: (root / name).read_text(encoding="utf-8")  # noqa: E731
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', read("smupar/__init__.py"), re.MULTILINE)
    found = []
    heading = _HEADING.search(read("CHANGELOG.md"))
    if not heading or (heading["version"], bool(heading["date"])) != (version, True):
        there = heading[0] if heading else "no heading"
        found.append(
            f"CHANGELOG.md begins with {there!r}: python tests/support/release.py --raise-to VERSION writes version and date"
        )
    if f"\nversion: {version}\n" not in read("CITATION.cff"):
        found.append(f"CITATION.cff does not say 'version: {version}'")
    if heading and heading["date"] and f"\ndate-released: {heading['date']}\n" not in read("CITATION.cff"):
        found.append(f"CITATION.cff does not say 'date-released: {heading['date']}', as CHANGELOG.md does")
    found += [f"README.md links to {link!r}, which PyPI cannot resolve" for link in relative_links(read("README.md"))]
    found += [
        f"README.md says {words!r}, which a release makes untrue: word it so that it stays true"
        for words in dated(read("README.md"))
    ]
    if tag not in (None, f"v{version}"):
        found.append(f"the tag is {tag}, and the version is {version}: the tag should be v{version}")
    if tag is None and f"v{version}" in _git(root, "tag").split():
        found.append(f"v{version} is released already: raise __version__ in smupar/__init__.py")
    if changed := _git(root, "status", "--porcelain"):
        found.append(f"there are changes that are not committed:\n{changed}")
    return found


def raise_to(root: Path, version: str) -> None:
    """Writes a version to the package, to the changelog above its first changes, and to the citation, with today's date."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version!r} is not a version such as 1.2.3")
    today = datetime.now(UTC).date().isoformat()
    texts: dict[Path, str] = {}
    for name, old, new in (
        ("smupar/__init__.py", r'^__version__ = ".*"$', f'__version__ = "{version}"'),
        ("CHANGELOG.md", r"^## Unreleased$", f"## {version} ({today})"),
        ("CITATION.cff", r"^version: .*$", f"version: {version}"),
        ("CITATION.cff", r"^date-released: .*$", f"date-released: {today}"),
    ):
        before = texts.get(root / name) or (root / name).read_text(encoding="utf-8")
        texts[root / name], num_lines = re.subn(old, new, before, count=1, flags=re.MULTILINE)
        if not num_lines:
            raise SystemExit(f"{name} has no line {old.strip('^$')!r}: write one, then run this again")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def relative_links(text: str) -> list[str]:
    """Targets of Markdown links and pictures that are neither absolute nor inside the page."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("https://", "http://", "#"))]


def dated(text: str) -> list[str]:
    """Words about whether a version is released. They would have to be changed by hand for each release."""
    return re.findall(r"not (?:yet )?on PyPI(?: yet)?|unreleased|not released", text, re.IGNORECASE)


def urls() -> dict[str, str]:
    """The project's addresses on the web, by name."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True).stdout.rstrip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="the tag that is released; by default it must not exist yet")
    parser.add_argument("--raise-to", metavar="VERSION", help="write this version and today's date, and check nothing")
    asked = parser.parse_args()
    if asked.raise_to:
        raise_to(ROOT, asked.raise_to)
        print(f"wrote {asked.raise_to} to the package, CHANGELOG.md and CITATION.cff: commit it, then run make release")
        sys.exit()
    wrong = problems(ROOT, asked.tag)
    print("\n".join(f"- {sentence}" for sentence in wrong) or "ready")
    sys.exit(1 if wrong else 0)
