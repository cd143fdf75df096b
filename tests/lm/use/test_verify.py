"""Files that other tools wrote, without checksums."""

import torch
from safetensors.torch import save_file

from smupar.lm.use.verify import inspect, inspecting


def inspected(folder):
    with inspecting(folder) as found:
        inspect(folder, found)
    return found


def test_file_without_checksums_is_named_and_a_broken_one_is_damaged(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(64)}, path)
    assert str(tmp_path) in str(inspected(tmp_path))
    assert "without checksums, as older versions and other tools write files" in str(inspected(tmp_path))
    for broken in (path.read_bytes()[:-8], b"garbage " * 12):
        path.write_bytes(broken)
        found = inspected(tmp_path)
        assert str(found) == "1 part damaged or missing"
        assert found.wrong[0].startswith(f"{path} is damaged (")
