"""Tables of points are read in any order of columns, and errors name the line."""

from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.lab.predict.points import ScalingPoint, parse_points, read_points

HEADINGS = "ranks,nodes,rank_batch,images,time_s\n"


def test_rows_are_points() -> None:
    assert parse_points(HEADINGS + "4,1,256,12811670,5355.9\n", "t.csv") == (
        ScalingPoint(4, 1, 256, 12811670.0, 5355.9),
    )


def test_columns_are_found_by_name_in_any_order_and_others_are_ignored() -> None:
    text = "note, time_s,images,rank_batch,nodes,ranks\nfirst, 2.5,1e3,32,1,2.0\n"
    assert parse_points(text, "t.csv") == (ScalingPoint(2, 1, 32, 1000.0, 2.5),)


def test_comments_empty_lines_byte_order_marks_and_other_ends_of_lines_are_no_matter(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xef\xbb\xbf# from a paper\r\n\r\n" + HEADINGS.strip().encode() + b"\r\n1,1,8,80,4\r\n,,,,\r\n")
    assert read_points(file) == (ScalingPoint(1, 1, 8, 80.0, 4.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: is empty (its first line has to be ranks,nodes,rank_batch,images,time_s)"),
        (HEADINGS, "t.csv: holds no points (add a line for each run, such as 4,1,128,12811670,5355.9)"),
        ("rank,nodes,rank_batch,images,time_s\n1,1,1,1,1\n", "t.csv:1: has no column ranks (did you mean 'rank'?)"),
        ("ranks,ranks,nodes,rank_batch,images,time_s\n", "t.csv:1: has column ranks 2 times (keep one)"),
        (HEADINGS + "\n1,1,8,80\n", "t.csv:3: has 4 values (write one for each column"),
        (HEADINGS + "1,1,8,80,4\n1,1,8,80,x\n", "t.csv:3: time_s: 'x' is not a number (write one"),
        (HEADINGS + "1,1,8,80,\n", "t.csv:2: time_s: '' is not a number"),
        (HEADINGS + "0,1,8,80,4\n", "t.csv:2: ranks: 0 is not above 0 (write what was measured)"),
        (HEADINGS + "1,1,8,80,nan\n", "t.csv:2: time_s: nan is not above 0"),
        (HEADINGS + "1,1,8,80,inf\n", "t.csv:2: time_s: inf is not above 0"),
        (HEADINGS + "1,1,8,80,-4\n", "t.csv:2: time_s: -4 is not above 0"),
        (HEADINGS + "1,1,8,1e300,4\n", "t.csv:2: images: 1e300 cannot be (write it between 1e-09 and 1e+15)"),
        (HEADINGS + "1.5,1,8,80,4\n", "t.csv:2: ranks: 1.5 is not a whole number (write one from 1 up)"),
        (HEADINGS + "2,4,8,80,4\n", "t.csv:2: nodes: 4 are more than the 2 ranks (each node has at least one)"),
        (HEADINGS + '1,1,"8,80,4\n', "t.csv:2: is not CSV: "),
    ],
)
def test_a_fault_is_reported_in_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_points(text, "t.csv")
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: cannot be read: No such file"):
        read_points(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is not text in UTF-8"):
        read_points(tmp_path / "binary.csv")
