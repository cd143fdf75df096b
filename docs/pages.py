"""For mkdocs.yml: examples become pages of the site, and lists of arguments in docstrings become lists."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

EXAMPLES = Path(__file__).parent.parent / "examples"


def on_files(files: Any, config: Any) -> Any:
    for example in sorted(EXAMPLES.glob("*.py")):
        page = f"# {example.name}\n\n```python\n{example.read_text()}```\n"
        files.append(File.generated(config, f"examples/{example.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In the repository links go to the files, here to their pages."""
    return re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)", markdown)


class Arguments(griffe.Extension):
    """``name      what it is``, in lines of a docstring, as a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _with_lists(obj.docstring.value)


def _with_lists(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        argument = re.match(r"(\w+) {2,}(\S.*)", line)
        if argument:
            lines += [*([] if inside else [""]), f"- `{argument[1]}`: {argument[2]}"]
            inside = True
        elif inside and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            inside = False
            lines.append(line)
    return "\n".join(lines).replace("``", "`")
