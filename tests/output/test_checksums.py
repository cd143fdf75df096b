"""Checksums of files and tensors: what they cover, and what is said about damage."""

import json

import pytest
import torch
import xxhash
from safetensors.torch import save, save_file

from smupar.output.checksums import SUMS, check_sums, parts_of, read_sums, write_sums, wrong_parts
from smupar.output.json_files import DamagedFileError

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3, dtype=torch.bool), "none": torch.zeros(0)}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("hello")
    write_sums(tmp_path, ["model.safetensors", "notes.txt"])
    return tmp_path


def test_parts_are_the_header_and_each_tensor_and_cover_the_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    sums = read_sums(folder, remedy="")
    parts = {part.name: part for part in sums["model.safetensors"]}
    assert parts.keys() == {"", "a", "b", "none"}
    assert sum(part.num_bytes for part in parts.values()) == len(data)
    assert parts["b"].xxh3 == xxhash.xxh3_64_hexdigest(TENSORS["b"].numpy().tobytes())
    assert [part.xxh3 for part in sums["notes.txt"]] == [xxhash.xxh3_64_hexdigest(b"hello")]


def test_parts_in_memory_are_those_on_disk(folder):
    data = save(TENSORS)
    (folder / "model.safetensors").write_bytes(data)
    write_sums(folder, ["model.safetensors"])
    assert list(parts_of(data)) == list(read_sums(folder, remedy="")["model.safetensors"])


def test_every_flipped_byte_is_found(folder):
    file, sums = folder / "model.safetensors", read_sums(folder, remedy="")
    data = file.read_bytes()
    for position in range(len(data)):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert len(wrong_parts(folder, sums)) == 1
    file.write_bytes(data)
    assert wrong_parts(folder, sums) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "notes.txt").write_text("hallo"), r"notes\.txt does not match its checksum"),
        (lambda f: (f / "notes.txt").write_text("hell"), r"notes\.txt has 4 bytes, expected 5"),
        (lambda f: (f / "notes.txt").unlink(), r"notes\.txt is missing"),
        (lambda f: (f / SUMS).write_text((f / SUMS).read_text().replace("notes", "Notes")), r"sums\.json is damaged"),
        (lambda f: (f / SUMS).write_text('{"format": "smupar-sums/9", "files": {}}'), "not a list of checksums in format"),
        (
            lambda f: (f / SUMS).write_text('{"format": "smupar-sums/1", "files": {"a": [["", -1, ""]]}}'),
            "not a list of checks",
        ),
    ],
)
def test_damage_is_named_with_the_remedy(folder, damage, said):
    assert check_sums(folder, remedy="get another copy")
    damage(folder)
    with pytest.raises(DamagedFileError, match=rf"{said}.*: get another copy$"):
        check_sums(folder, remedy="get another copy")


def test_folder_without_checksums_says_so_and_a_choice_is_checked_alone(folder):
    (folder / "notes.txt").unlink()
    assert check_sums(folder, remedy="", only=lambda name: name.startswith("model"))
    (folder / SUMS).unlink()
    assert not check_sums(folder, remedy="")


def test_shares_of_two_processes_are_everything(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[9] ^= 1  # in the header
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    sums = read_sums(folder, remedy="")
    shares = [wrong_parts(folder, sums, share=(rank, 2)) for rank in (0, 1)]
    assert sorted([*shares[0], *shares[1]]) == sorted(wrong_parts(folder, sums))
    assert len(wrong_parts(folder, sums)) == 2


def test_list_of_checksums_is_plain_json(folder):
    assert json.loads((folder / SUMS).read_text())["format"] == "smupar-sums/1"
