"""Any order of appends, trims, holes, forks, adoptions, files and changes of mode leaves the rows that a list would."""

from __future__ import annotations

import pytest
from lifecycle import Lifecycle, run

from kvcore.backends import Backend


def test_any_history_leaves_the_rows_that_a_list_would_hold(backend: Backend) -> None:
    run(Lifecycle, backend, 100 if backend.name == "reference" else 12)


@pytest.mark.full
def test_many_histories_leave_the_rows_that_a_list_would_hold(backend: Backend) -> None:
    run(Lifecycle, backend, 2000 if backend.name == "reference" else 200)
