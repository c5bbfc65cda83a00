"""Names of adapters and places in S3: what comes from a request can't become another path, key or bucket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.errors import UserError
from clew.serving.names import check_adapter_name, parse_s3


@pytest.mark.parametrize("name", ["a", "step-000010", "laptop-s0-step000120-83dc3c873094", "A.b_c-9", "x" * 128])
def test_names_that_are_allowed(name: str) -> None:
    assert check_adapter_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a..b", "/a", "a/b", "../a", "-a", ".a", "a b", "a\n", "a\0", "ä", "x" * 129, "a:b", "a%2fb"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="adapter's name") as refused:
        check_adapter_name(name)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300


@given(st.text())
def test_an_allowed_name_is_one_part_of_a_path(name: str) -> None:
    try:
        check_adapter_name(name)
    except UserError:
        return
    assert Path("/root", name).parent == Path("/root") and os.path.normpath(f"/root/{name}") == f"/root/{name}"


@pytest.mark.parametrize("uri", ["s3://models/maze", "s3://models/maze/", "s3://my.bucket-1/a/b.c/d_e"])
def test_places_that_are_allowed(uri: str) -> None:
    assert parse_s3(uri).uri == uri.rstrip("/")


@pytest.mark.parametrize(
    "uri",
    [
        *("s3://models", "s3://models/", "s3:///maze", "S3://models/maze", "http://models/maze", "s3://models\n/maze"),
        *("s3://Models/maze", "s3://mo/maze", "s3://m..d/maze", "s3://-model/maze", "s3://model-/maze"),
        *("s3://192.168.0.1/maze", "s3://xn--model/maze", "s3://model-s3alias/maze", f"s3://{'a' * 64}/maze"),
        *("s3://models//maze", "s3://models/maze//x", "s3://models/../x", "s3://models/a/../b", "s3://models/.hidden"),
        *("s3://models/a?b", "s3://models/a%20b", "s3://models/a b", "s3://models/\u00e4", "s3://models/maze\n"),
        *("s3://key:secret@models/maze", f"s3://models/{'a/' * 400}a"),
    ],
)
def test_places_that_are_refused(uri: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_s3(uri)
    assert str(refused.value).isprintable()
