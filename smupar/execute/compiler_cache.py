"""Keeps torch.compile from loading code of other users.

torch.compile caches code in a folder whose name anyone can guess, /tmp/torchinductor_<user>, and loads whatever is there. Our
CUDA kernels are safe, since torch compiles them in memory, and Triton's cache is in the user's home.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from smupar.output.private_folders import NotPrivateError, cache_folder, private_folder

_SETTING = "TORCHINDUCTOR_CACHE_DIR"


def guard_compiler_cache() -> None:
    """Makes torch's folder before anybody else can. If somebody else has made it, torch gets a private folder in the user's
    cache instead. A folder that the user chose stays."""
    named = os.environ.get(_SETTING)
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    guessed = Path(default_cache_dir())
    # torch sets the variable to its own guess when its compiler is first imported.
    if named not in (None, str(guessed.absolute())):
        return
    try:
        parent = guessed.parent.stat().st_mode
        if parent & stat.S_IWOTH and not parent & stat.S_ISVTX:
            raise NotPrivateError(f"others can rename what is in {guessed.parent}")
        with private_folder(guessed):
            return
    except OSError:
        os.environ[_SETTING] = _own_folder()


def _own_folder() -> str:
    try:
        own = cache_folder() / "torch"
        with private_folder(own.parent), private_folder(own):
            return str(own)
    except OSError as error:
        raise ValueError(
            f"there is no private folder for the code of torch.compile ({error}): set {_SETTING} to a folder of your own"
        ) from error
