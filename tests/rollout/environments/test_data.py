from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from headrace.base.errors import DataError
from headrace.rollout.environments.data import RowOrder, as_rows, load_rows

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "zwei\u2028 ü", "answer": 4}]


def written(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_the_same_rows_come_from_every_kind_of_file(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    assert load_rows(written(tmp_path / "a.jsonl", lines + "\n\n")) == ROWS
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert load_rows(tmp_path / "a.parquet") == ROWS
    csv = 'prompt,answer\n"1+1=",2\n"zwei\u2028 ü",4\n'
    assert load_rows(written(tmp_path / "a.CSV", csv)) == [{**row, "answer": str(row["answer"])} for row in ROWS]
    assert as_rows(datasets.Dataset.from_list(ROWS)) == ROWS
    assert as_rows(row for row in ROWS) == ROWS


def test_files_of_excel_and_windows_are_read(tmp_path: Path) -> None:
    csv = b'\xef\xbb\xbfprompt,answer\r\n"a\r\nb",1\r\n'
    assert load_rows(written(tmp_path / "a.csv", csv)) == [{"prompt": "a\r\nb", "answer": "1"}]
    assert load_rows(written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n')) == [{"prompt": "a"}]
    unnamed = b",prompt\n0,a\n"  # what pandas writes with its index
    assert load_rows(written(tmp_path / "b.csv", unnamed)) == [{"": "0", "prompt": "a"}]


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": }\n', 3),
        ("a.jsonl", '{"prompt": "a"}\n["a"]\n', 2),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', 2),
        ("a.jsonl", '{"prompt": ' + "9" * 5000 + "}\n", 1),
        ("a.jsonl", '{"prompt": ' + "[" * 100_000 + "\n", 1),
        ("a.csv", "prompt,answer\na,1\nb\n", 3),
        ("a.csv", "prompt,answer\na,1\nb,2,3\n", 3),
        ("a.csv", b"prompt,answer\na,1\n\xff,2\n", 3),
        ("a.csv", 'prompt,answer\na,1\n"b" x,2\n', 3),
        ("a.csv", "prompt\n" + "x" * 200_000 + "\n", 2),
        ("a.csv", 'prompt\na\n"b\n', 3),
    ],
)
def test_a_malformed_row_is_refused_with_its_file_and_line(
    tmp_path: Path, name: str, data: str | bytes, line: int
) -> None:
    path = written(tmp_path / name, data)
    with pytest.raises(DataError) as refused:
        load_rows(path)
    assert refused.value.problem.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.csv", "prompt,answer\n", "has no rows"),
        ("a.csv", "", "has no rows"),
        ("a.txt", "x", "unknown kind of file"),
        ("a.parquet", "x", "is not a Parquet file"),
    ],
)
def test_a_file_without_usable_rows_is_refused_by_name(tmp_path: Path, name: str, data: str, problem: str) -> None:
    path = written(tmp_path / name, data)
    with pytest.raises(DataError, match=problem) as refused:
        load_rows(path)
    assert str(path) in refused.value.problem


def test_a_data_file_that_is_missing_or_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dir.jsonl").mkdir()
    for name, problem in (("none.jsonl", "does not exist"), ("dir.jsonl", "no reader finds rows")):
        with pytest.raises(DataError, match=problem):
            load_rows(tmp_path / name)


def test_rows_in_python_that_are_none_are_refused() -> None:
    with pytest.raises(DataError, match="has no rows"):
        as_rows([])
    with pytest.raises(DataError, match="row 2 of the dataset is a str, not a dict"):
        as_rows([{"prompt": "a"}, "b"])  # type: ignore[list-item]
    with pytest.raises(DataError, match="one split"):
        as_rows(datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)))


@given(num_rows=st.integers(1, 30), seed=st.integers(0, 1000), epochs=st.integers(1, 4))
def test_every_epoch_visits_every_row_once_and_the_order_is_a_function_of_the_number(
    num_rows: int, seed: int, epochs: int
) -> None:
    order = RowOrder(num_rows=num_rows, seed=seed, shuffle=True)
    visited = [order(number) for number in range(num_rows * epochs)]
    for epoch in range(epochs):
        assert sorted(visited[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    again = RowOrder(num_rows=num_rows, seed=seed, shuffle=True)
    assert [again(number) for number in reversed(range(num_rows * epochs))] == visited[::-1]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        tuple(RowOrder(num_rows=50, seed=seed, shuffle=True)(epoch * 50 + number) for number in range(50))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
