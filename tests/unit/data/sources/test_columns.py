"""Values per image: from a manifest, a Hugging Face dataset, or a CSV file beside any source."""

from pathlib import Path

import pytest
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.sources.build import build_datasets
from paceline.data.sources.columns import read_column, read_numbers
from paceline.data.sources.folds import build_run_datasets
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder, HuggingFace, Manifest, Synthetic

SYNTHETIC = Synthetic(num_images=3, num_val_images=1, image_size=1)


def train_of(section):
    return build_datasets(section, may_download=False).train


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the column `w` of CSV text for the images of a section."""

    def of(text, section=SYNTHETIC, column="w", function=read_column):
        (tmp_path / "values.csv").write_text(text)
        file = str(tmp_path / "values.csv")
        return function(section, train_of(section), column, file, "data.sampler.column")

    return of


def test_a_manifest_has_values_in_its_own_list(make_images, tmp_path):
    make_images({"a": 3})
    lines = ["a/2.png,x,3,s", "", "a/0.png,y,1,", "a/1.png,x,2,t"]
    (tmp_path / "train.csv").write_text("\n".join(["path,label,w,group", *lines]))
    section = Manifest(train=str(tmp_path / "train.csv"))
    assert read_column(section, train_of(section), "w") == ["3", "1", "2"]
    assert read_column(section, train_of(section), "group") == ["s", "", "t"]


@pytest.mark.parametrize("root", ["common", "auto"])
def test_images_of_both_lists_have_the_values_of_their_own(make_images, tmp_path, root):
    top = make_images({"train/a": 2, "val/a": 2}, top=tmp_path / "data")
    for split, values in (("train", "12"), ("val", "34")):
        folder = f"{split}/a" if root == "common" else "a"
        lines = [f"./{folder}/{index}.png,x,{value}" for index, value in enumerate(values)]
        (top / split / "list.csv").write_text("\n".join(["path,label,w", *lines]))
    section = Manifest(
        train=str(top / "train/list.csv"), val=str(top / "val/list.csv"), root=str(top) if root == "common" else "auto"
    )
    found = {}
    for fold in range(2):
        split = {"folds": 2, "fold": fold, "pool": "all"}
        train = build_run_datasets(Data(source=section, split=split), may_download=False).train
        for index, value in enumerate(read_column(section, train, "w")):
            found[str(Path(train.name_of(index)).relative_to(top))] = value
    assert found == {"train/a/0.png": "1", "train/a/1.png": "2", "val/a/0.png": "3", "val/a/1.png": "4"}


@pytest.mark.parametrize("kind", ["listed", "full", "image"])
def test_a_file_names_the_images_of_a_folder_in_any_order(make_images, tmp_path, read, kind):
    root = make_images({"train/cat": 2, "train/dog": 1, "val/cat": 1, "val/dog": 1}, top=tmp_path / "data")
    section = Folder(root=str(root))
    train = train_of(section)
    names = [train.get_listed_path(index) if kind == "listed" else train.name_of(index) for index in range(3)]
    lines = [f"{index},{names[index]}" for index in (2, 0, 1)]
    column = "image" if kind == "image" else "path"
    assert read("\n".join([f"w,{column}", *lines, "9,val/cat/0.png"]), section) == ["0", "1", "2"]


def test_a_file_without_names_has_a_line_for_each_image_in_order(read):
    assert read("v,w\n1,a\n2,b\n3,c\n") == ["a", "b", "c"]
    assert read("w\n1\n2.5\n-3e2\n", function=read_numbers).tolist() == [1, 2.5, -300]


def test_a_huggingface_dataset_has_columns(tmp_path):
    hf = pytest.importorskip("datasets", reason="the package datasets is not installed: pip install datasets")
    rows = {"image": [Image.new("L", (2, 2))] * 3, "label": [0, 1, 0], "w": [2.5, 1.0, None]}
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["a", "b"]), "w": hf.Value("float64")})
    split = hf.Dataset.from_dict(rows, features=features)
    hf.DatasetDict({"train": split, "val": split}).save_to_disk(str(tmp_path / "saved"))
    section = HuggingFace(root=str(tmp_path / "saved"))
    assert read_column(section, train_of(section), "w") == ["2.5", "1.0", ""]
    with pytest.raises(DataError, match=r"^x\.column: .*saved has no column 'v' \(it has image, label, w\)$"):
        read_column(section, train_of(section), "v", field="x.column")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v\n1\n", "data.sampler.column: FILE has no column 'w' (it has v)"),
        ("", "data.sampler.column: FILE has no column 'w' (it has )"),
        ("w\n1\n2\n", "FILE: has 2 lines for 3 training images; "),
        ("w,image\n1,synthetic/train[0]\n2,synthetic/train[2]\n", "FILE: has no line for 1 of 3 training images, the "),
        ("w,image\n1,a\n2,a\n", "FILE:3: 'a' is listed twice, with two values; "),
        ("image,w\na,1\nb\n", "FILE:3: has no value in column 'w'; "),
        ('w\n"1\n', "FILE:"),
    ],
)
def test_errors_name_file_line_value_and_fix(read, tmp_path, text, message):
    with pytest.raises(DataError) as caught:
        read(text)
    assert str(caught.value).startswith(message.replace("FILE", str(tmp_path / "values.csv")))


def test_a_source_without_columns_needs_a_file():
    with pytest.raises(DataError, match=r"^data\.sampler\.column: 'w' .* synthetic.*\(name a CSV file\)$"):
        read_column(SYNTHETIC, train_of(SYNTHETIC), "w", field="data.sampler.column")
