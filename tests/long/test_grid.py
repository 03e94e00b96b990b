"""The whole grid of what tests/test_store.py covers: any number of rows, rows a batch and workers. Reference: each row
alone through Transformers.
"""

from itertools import product

import pytest
from test_store import check_grid

GRID = list(product((1, 7, 10, 32, 257), (1, 8, 32), (1, 2, 3)))


@pytest.mark.parametrize("num_rows, rows_a_batch, workers", GRID)
def test_captured_rows_equal_each_row_alone(tmp_path, num_rows, rows_a_batch, workers):
    check_grid(tmp_path, num_rows, rows_a_batch, workers)
