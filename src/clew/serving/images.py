"""Images of a request: data: URLs of PNG, JPEG or WebP, decoded within bounds. No URL is ever fetched."""

from __future__ import annotations

import base64
import binascii
import io
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image

from clew.serving.errors import ApiError, bad
from clew.serving.limits import Limits

_FORMATS = {"png": "PNG", "jpeg": "JPEG", "jpg": "JPEG", "webp": "WEBP"}
_HEAD = re.compile(r"data:image/(png|jpe?g|webp);base64,", re.IGNORECASE | re.ASCII)
_LONGEST_SIDE = 16_384


@dataclass(frozen=True)
class EncodedImage:
    """An image whose header has been read, and no more.

    Attributes:
        data: the encoded bytes.
        format: Pillow's name; only its decoder is tried.
        height, width: in pixels.
        where: the part of the request it came in.
    """

    data: bytes
    format: str
    height: int
    width: int
    where: str


def open_image(url: str, where: str, limits: Limits) -> EncodedImage:
    """Reads a data: URL and the image's header.

    Raises:
        ApiError: 400, and what is wrong with it.
    """
    head = _HEAD.match(url)
    if head is None:
        raise bad("give images as data:image/png;base64,... (or jpeg, webp): no other URL is read", where)
    encoded = url[head.end() :]
    if len(encoded) > limits.image_bytes * 4 // 3 + 4:
        raise bad(f"the image has more than {limits.image_bytes} bytes", where, "image_too_large")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad("the image is no valid base64", where, "invalid_image") from error
    kind = _FORMATS[head[1].lower()]
    try:
        width, height = _webp_size(data) if kind == "WEBP" else _size(data, kind)
    except Exception as error:  # Pillow's decoders raise many kinds on bytes that are no image
        raise _broken(kind, where) from error
    if max(width, height) > _LONGEST_SIDE:
        raise bad(f"the image has a side of more than {_LONGEST_SIDE} pixels", where, "image_too_large")
    return EncodedImage(data, kind, height, width, where)


def decode_image(image: EncodedImage) -> np.ndarray:
    """The pixels, uint8 RGB [height, width, 3]; transparency is dropped, the first frame is taken.

    Raises:
        ApiError: 400: it is damaged.
    """
    try:
        with _opened(image.data, image.format) as opened:
            pixels = np.array(opened.convert("RGB"))
        if pixels.shape != (image.height, image.width, 3):
            raise ValueError("another size than its header says")
    except Exception as error:  # see above
        raise _broken(image.format, image.where) from error
    return pixels


def _opened(data: bytes, kind: str) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=[kind])


def _size(data: bytes, kind: str) -> tuple[int, int]:
    with _opened(data, kind) as image:
        return image.size


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height. Pillow would have memory for all of the canvas before it told them."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        raise ValueError("no WebP")
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if data[12:16] == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    raise ValueError("no WebP")


def _broken(kind: str, where: str) -> ApiError:
    return bad(f"the image is damaged, or no {kind}", where, "invalid_image")
