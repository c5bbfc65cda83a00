"""Messages become the ledger's ids; images are read within bounds; streams of text add up."""

from __future__ import annotations

import base64
import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clew.policy.model import VisionLanguageModel, load_model, load_processor
from clew.serving.errors import ApiError
from clew.serving.images import decode_image, open_image
from clew.serving.limits import Limits
from clew.serving.prompt import PromptBuilder
from clew.serving.requests import parse_request
from clew.serving.text import Detokenizer

LIMITS = Limits()


@functools.cache
def loaded(folder: Path) -> tuple[VisionLanguageModel, PromptBuilder]:
    return load_model(folder), PromptBuilder(load_processor(folder), LIMITS)


@pytest.fixture(scope="module", params=[tiny.tiny_folder, tiny.qwen_folder], ids=["tiny", "qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param()


@pytest.fixture
def builder(folder: Path) -> PromptBuilder:
    return loaded(folder)[1]


def data_url(frame: np.ndarray, kind: str = "png") -> str:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, kind)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def image(frame: np.ndarray) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(frame)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def body(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 8, **fields}).encode()


def refusal(builder: PromptBuilder, data: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        builder.build(parse_request(data, builder.limits))
    assert caught.value.status == 400
    return caught.value


@settings(max_examples=20)
@given(data=st.data())
def test_ids_are_the_ledgers(folder: Path, data: st.DataObject) -> None:
    """Any conversation of observations and answers, sent as text, is token by token what was played."""
    vlm, builder = loaded(folder)
    words = st.text(st.characters(codec="utf-8", exclude_characters="<|"), max_size=20)
    answers = data.draw(st.lists(words, max_size=3))
    trajectory = tiny.conversation(vlm, answers, seed=data.draw(st.integers(0, 50)))
    tiny.show(vlm, trajectory, tiny.noise(77, 64, 96), "Moved.")
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(trajectory.turns):
        said = f"Look at it.\n{turn.text}" if i == 0 else turn.text
        messages.append({"role": "user", "content": [image(turn.frame), text(said)]})
        if i < len(answers):
            messages.append({"role": "assistant", "content": answers[i]})
    prompt = builder.build(parse_request(body(messages), LIMITS))
    assert prompt.token_ids == trajectory.token_ids
    assert prompt.grids == trajectory.grids
    assert all((a == b).all() for a, b in zip(prompt.frames, trajectory.frames, strict=True))


def test_an_answer_keeps_the_special_tokens_it_said(builder: PromptBuilder) -> None:
    """What the model may have said comes back as it was; what it never says is refused."""
    tokenizer = builder.template.tokenizer

    def conversation(said: str) -> bytes:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
        return body([*messages, {"role": "user", "content": "b"}])

    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = builder.build(parse_request(conversation("up<|im_start|>x"), LIMITS)).token_ids
    assert ids.count(start) == 5
    for said in ("<|im_end|>", "<|image_pad|>", "<|vision_start|>"):
        assert said in refusal(builder, conversation(said)).message


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_text_is_no_template(builder: PromptBuilder, token: str, role: str) -> None:
    messages = [{"role": role, "content": f"x{token}y"}, {"role": "user", "content": [text("hello")]}]
    error = refusal(builder, body(messages))
    assert token in error.message and error.param == "messages.0.content"


def test_bounds_are_kept_before_anything_is_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clew.serving.prompt.decode_image", lambda image: pytest.fail("an image was decoded"))
    builder = PromptBuilder(load_processor(folder), Limits(images=2, pixels=30_000))
    small, large = image(tiny.noise(0)), image(tiny.noise(0, 200, 200))
    assert refusal(builder, body([{"role": "user", "content": [small] * 3}])).code == "too_many_images"
    assert refusal(builder, body([{"role": "user", "content": [large]}])).code == "image_too_large"
    assert refusal(builder, body([{"role": "user", "content": "word " * 5000}])).code == "context_length_exceeded"
    too_long = body([{"role": "user", "content": [small]}], max_tokens=4090)
    assert refusal(builder, too_long).code == "context_length_exceeded"
    assert (
        "only a user"
        in refusal(builder, body([{"role": "system", "content": [small]}, {"role": "user", "content": ""}])).message
    )
    assert "patches" in refusal(builder, body([{"role": "user", "content": [image(tiny.noise(0, 1, 900))]}])).message


def test_too_many_words_are_not_made_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are long ones remembered: each would stay in memory."""
    builder = PromptBuilder(load_processor(folder), Limits(characters=20_000))
    builder.build(parse_request(body([{"role": "user", "content": "up"}]), LIMITS))
    kept = builder._encode_short.cache_info().currsize
    refusal(builder, body([{"role": "user", "content": "word " * 3000}]))
    assert builder._encode_short.cache_info().currsize == kept
    monkeypatch.setattr(builder, "_tokenise", lambda messages: pytest.fail("made tokens"))
    error = refusal(builder, body([{"role": "user", "content": [text("x" * 10_001)] * 2}]))
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_images_are_what_pillow_makes_of_them(kind: str) -> None:
    frame = tiny.noise(1, 50, 70)
    url = data_url(frame, kind)
    opened = open_image(url, "here", LIMITS)
    assert (opened.height, opened.width) == (50, 70)
    decoded = decode_image(opened)
    plain = np.array(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))
    assert (decoded == plain).all() and (kind != "png" or (decoded == frame).all())
    lossless = io.BytesIO()
    Image.fromarray(frame).save(lossless, "webp", lossless=True)
    again = open_image(f"data:image/webp;base64,{base64.b64encode(lossless.getvalue()).decode()}", "here", LIMITS)
    assert (decode_image(again) == frame).all()


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/x.png", "file:///etc/passwd", "data:image/png,x", "data:image/gif;base64,R0lG", "", "/etc"],
)
def test_no_other_url_is_read(url: str) -> None:
    with pytest.raises(ApiError, match="no other URL"):
        open_image(url, "here", LIMITS)


@given(st.binary(max_size=300), st.sampled_from(["png", "jpeg", "webp"]))
def test_bytes_that_are_no_image_are_refused(data: bytes, kind: str) -> None:
    head = {"png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "jpeg": b"\xff\xd8\xff\xe0", "webp": b"RIFF0000WEBPVP8X"}[kind]
    for content in (data, head + data):
        try:
            decode_image(open_image(f"data:image/{kind};base64,{base64.b64encode(content).decode()}", "here", LIMITS))
        except ApiError as error:
            assert error.status == 400


@given(st.lists(st.integers(0, 255), max_size=40), st.data())
def test_pieces_of_text_add_up(ids: list[int], data: st.DataObject) -> None:
    """Bytes of any kind, cut anywhere: the pieces together are the text of all of them."""
    tokenizer = loaded(tiny.qwen_folder())[0].tokenizer
    text_of = Detokenizer(tokenizer)
    pieces, rest = [], list(ids)
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        pieces.append(text_of.add(rest[:n]))
        rest = rest[n:]
    pieces.append(text_of.add([], last=True))
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"top_p": 0.9}, "top_p"),
        ({"stop": ["x"]}, "stop"),
        ({"temperature": 1e-5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body(**{"messages": [{"role": "user", "content": "x"}], **fields}), LIMITS)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_fields_that_change_nothing_are_tolerated() -> None:
    neutral = {"n": 1, "tools": None, "top_p": 1.0, "stop": None, "user": "me", "store": False, "tool_choice": "none"}
    request = parse_request(
        body([{"role": "user", "content": "x"}], seed=-1, max_completion_tokens=3, **neutral), LIMITS
    )
    assert (request.seed, request.wanted_tokens) == (-1, 3)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b'{"model": NaN}', b'{"model": "\xff"}', b"null", b"\x00"])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError):
        parse_request(data, LIMITS)
