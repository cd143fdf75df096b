"""What a run refuses before it starts, and before it goes on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.shards import TokenizerInfo
from smupar.lm.run.distributed import World
from smupar.lm.run.train import train
from smupar.output.files import locked
from tests.lm.run.runs import HOW, resumable


def test_folder_of_another_configuration_is_refused_and_left_alone(finished, config):
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.rglob("*.json*") if path.is_file()}
    other = replace(config, lr=0.5, model=replace(config.model, depth=2))
    with pytest.raises(ValueError, match=r"depth 1 there, 2 here; lr 0.015625 there, 0.5 here.*another --out"):
        train(other, replace(HOW, out=str(folder)))
    assert {path: path.read_bytes() for path in before} == before


def test_folder_with_other_files_is_refused(config, tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(ValueError, match="holds other files and no run"):
        train(config, replace(HOW, out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_text_that_changed_since_the_start_is_refused(finished, config, tmp_path):
    reference, _ = finished
    folder, other = resumable(reference, tmp_path / "run", 27), tmp_path / "text"
    write_tokens(other, np.zeros(50_000, np.uint8), TokenizerInfo("bytes", 256, 0, "b"))
    (folder / "config.json").write_text(replace(config, data=str(other)).to_json())
    with pytest.raises(ValueError, match="is not the one that"):
        train(replace(config, data=str(other)), replace(HOW, out=str(folder)))


def test_folder_in_use_is_refused(config, tmp_path):
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="another process is working"):
        train(config, replace(HOW, out=str(tmp_path / "run")))


def test_micro_batches_that_do_not_divide_raise(config, tmp_path):
    with pytest.raises(ValueError, match="the 4 sequences of a rank are not a multiple of micro_batch 3"):
        train(config, replace(HOW, out=str(tmp_path / "run"), micro_batch=3))


def test_configuration_that_cannot_be_built_does_not_keep_the_folder(config, tmp_path):
    how = replace(HOW, out=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="no learning-rate rule is known"):
        train(replace(config, optimizer="typo"), how)
    assert train(replace(config, steps=3), how).status == "finished"


def test_graph_without_a_gpu_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="--graph needs one GPU"):
        train(config, replace(HOW, out=str(tmp_path / "run"), graph=True))


def test_ranks_that_do_not_divide_the_batch_raise():
    with pytest.raises(ValueError, match="batch_size 5 does not divide among 2 ranks"):
        World(0, 2, torch.device("cpu"), "ddp").share_of(5)
