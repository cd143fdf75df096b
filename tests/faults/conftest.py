import contextlib
import shutil
import warnings
from types import SimpleNamespace

import pytest

from smupar.cli.main import main
from tests.support.texts import bpe

SHAPE = "--width 16 --base-width 8 --depth 1 --head-dim 8 --seq-len 16 --batch-size 2 --valid-batches 1 --vocab-size 320"
TRAIN = f"{SHAPE} --steps 12 --sparsity 0.5 --data text --device cpu --peak-tflops 1"
TRAIN += " --save-every 4 --keep 9 --valid-every 6 --log-every 3"
COMMANDS = {
    "run": f"train {TRAIN} --dynamic rigl --mask-every 3 --follow trace.json --out run",
    "proxy": f"train {TRAIN} --width 8 --sparsity 0 --record --out proxy",
    "study": f"sweep lr=0.01,0.02 {SHAPE} --steps 6 --sparsity 0.5 --data text --device cpu --out study",
}


def run(argv, capsys):
    """A command in this process. Anything but the end of a process is a traceback, and fails the test."""
    capsys.readouterr()
    code = 0
    with warnings.catch_warnings():  # also restores how they are shown
        warnings.simplefilter("always")
        try:
            main(argv.split())
        except SystemExit as ended:
            code = ended.code or 0
    said = capsys.readouterr()
    return SimpleNamespace(code=code, out=said.out, err=said.err, said=said.out + said.err)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with a text, a proxy and its trace, a run that is done, a run that is to go on, an export and a study."""
    root = tmp_path_factory.mktemp("faults") / "made"
    root.mkdir()
    (root / "source.txt").write_text("Größe zählt. " * 400, encoding="utf-8")
    bpe(["Größe zählt. " * 40]).save(str(root / "bpe.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        for line in (
            "data prepare source.txt --tokenizer bpe.json --out text",
            COMMANDS["proxy"],
            "COPY proxy/trace.json trace.json",
            COMMANDS["run"],
            "export run export",
            COMMANDS["study"],
        ):
            if line.startswith("COPY"):
                shutil.copy(*line.split()[1:])
                continue
            with contextlib.suppress(SystemExit):  # a run ends its process
                main(line.split())
    shutil.copytree(root / "run", root / "stopped")
    for name in ("summary.json", "trace.json", "sums.json"):
        (root / "stopped" / name).unlink()
    shutil.rmtree(root / "stopped/checkpoints/step-00000012")
    return root


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy of everything, in the working directory. Times are kept, since they must not be trusted."""
    shutil.copytree(made, tmp_path / "here", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"
