"""For mkdocs.yml. README becomes the home page, examples and the notebook become pages, lists of arguments in docstrings become
lists, and pages with formulas or diagrams get the scripts in docs/vendor that draw them."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
MERMAID = ["vendor/mermaid/mermaid.tiny.js"]
KATEX = ["vendor/katex/katex.min.js", "formulas.js"]


def on_config(config: Any) -> Any:
    config.repo_url, config.repo_name = REPOSITORY, "GitHub"
    return config


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, "index.md", content=home((ROOT / "README.md").read_text(encoding="utf-8"))))
    files.append(File.generated(config, "tour.md", content=notebook(EXAMPLES / "tour.ipynb")))
    for example in sorted(EXAMPLES.glob("*.py")):
        page = f"# {example.name}\n\n```python\n{example.read_text()}```\n"
        files.append(File.generated(config, f"examples/{example.stem}.md", content=page))
    return files


def home(readme: str) -> str:
    """README as a page of the site: its links to the documentation, which are absolute for PyPI, lead to pages."""
    return readme.replace(f"]({REPOSITORY}/blob/main/docs/", "](").replace(f"]({REPOSITORY}/raw/main/docs/", "](")


def notebook(path: Path) -> str:
    """A notebook with its outputs as a page; pictures stand in it as data."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            picture = output.get("data", {}).get("image/png")
            if picture:
                parts.append(f"![Picture](data:image/png;base64,{picture.strip()})")
            elif output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    parts.append(f"Run it yourself: [examples/{path.name}]({REPOSITORY}/blob/main/examples/{path.name}).")
    return home("\n\n".join(parts))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Puts mermaid before Material's script, which would otherwise load it from elsewhere."""
    up = "../" * page.url.count("/")
    output = output.replace(' data-md-component="source"', "")  # Material would ask GitHub how many stars there are
    if '<pre class="mermaid">' in output:
        output = output.replace("</head>", _scripts(MERMAID, up) + "</head>")
    if 'class="arithmatex"' in output:
        style = f'<link rel="stylesheet" href="{up}vendor/katex/katex.min.css">'
        output = output.replace("</head>", style + "</head>").replace("</body>", _scripts(KATEX, up) + "</body>")
    return output


def _scripts(paths: list[str], up: str) -> str:
    return "".join(f'<script src="{up}{path}"></script>' for path in paths)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the repository into links to their pages, and pictures into links to themselves in full size, as
    on GitHub."""
    markdown = re.sub(r"^(!\[[^\]]*\]\(([\w./-]+\.png)\))$", r"[\1](\2)", markdown, flags=re.MULTILINE)
    markdown = markdown.replace("](../examples/tour.ipynb)", "](tour.md)")
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
