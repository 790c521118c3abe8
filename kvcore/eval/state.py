"""Finished work on disk, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvcore.errors import InputError
from kvcore.eval.metrics import Positions

_ABOUT = "about"


class State:
    """Positions of each finished variant and window, in one .npz file that is replaced as a whole.

    ``about`` says what was run: model, text, dtype, path. InputError where the file belongs to another run, or is none.
    Without a path nothing is kept on disk.
    """

    def __init__(self, path: Path | None, about: Mapping[str, object]) -> None:
        self._path, self._about = path, json.dumps(about, sort_keys=True)
        self._done: dict[str, np.ndarray] = {}
        if path is not None and path.exists():
            self._done = self._read(path)

    def __len__(self) -> int:
        return len(self._done)

    def get(self, key: str) -> Positions | None:
        array = self._done.get(key)
        return None if array is None else Positions.from_array(array)

    def put(self, key: str, positions: Positions) -> None:
        self._done[key] = positions.to_array()
        if self._path is not None:
            self._write(self._path)

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            about = str(found.pop(_ABOUT))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{path}: not a state of kvcore eval ({error}); delete it, or give another --state"
            ) from error
        if about != self._about:
            ours, theirs = json.loads(self._about), json.loads(about)
            other = ", ".join(name for name in ours if theirs.get(name) != ours[name])
            raise InputError(f"{path} belongs to a run with another {other}: delete it, or give another --state")
        return found

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    np.savez(file, allow_pickle=False, **{_ABOUT: np.array(self._about)}, **self._done)
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise InputError(f"--state {path}: {error.strerror or error}") from error
