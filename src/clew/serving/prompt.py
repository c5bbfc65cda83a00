"""Messages to token ids, the same ids as the ledger's: pieces of the rendered chat, answers encoded between them."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2 import TemplateError

from clew.agent.template import ChatTemplate
from clew.policy.model import VISION_TOKENS, ModelProcessor
from clew.serving.errors import bad
from clew.serving.images import EncodedImage, decode_image, open_image
from clew.serving.limits import Limits
from clew.serving.requests import ChatMessage, ChatRequest, TextPart

_SHORT = 4096  # characters of a text whose tokens are remembered


@dataclass(frozen=True)
class Prompt:
    """What the model is shown.

    Attributes:
        token_ids: image placeholders expanded.
        grids: (t, h, w) patches of each image.
        frames: the images, uint8 RGB [height, width, 3].
    """

    token_ids: list[int]
    grids: list[tuple[int, int, int]]
    frames: list[np.ndarray]


class PromptBuilder:
    """Makes prompts for one model folder. Safe between threads.

    Attributes:
        context: tokens of prompt and answer together.
    """

    def __init__(self, processor: ModelProcessor, limits: Limits) -> None:
        self.template: ChatTemplate = processor.template
        self.patcher = processor.patcher
        self.limits = limits
        self._decoding = asyncio.Semaphore(2)
        self.context = min(processor.config.text_config.max_position_embeddings, limits.context)
        tokenizer = self.template.tokenizer
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(VISION_TOKENS)
        self._special = _any_of(special)
        # An answer may say any of the others: it comes back as the model said it.
        self._never_said = _any_of({self.template.end_of_turn, *VISION_TOKENS})
        self._encode_short = lru_cache(maxsize=512)(self._encode_long)

    async def build_apart(self, request: ChatRequest) -> Prompt:
        """``build`` on a thread, two at a time: images take memory while they are decoded.

        Raises:
            ApiError: see ``build``.
        """
        async with self._decoding:
            return await asyncio.to_thread(self.build, request)

    def open(self, request: ChatRequest) -> tuple[list[dict[str, Any]], list[EncodedImage]]:
        """The messages as a chat template takes them, and their images with no more than the headers read.

        Raises:
            ApiError: special tokens in a text, an image where none may be, too many or too large images.
        """
        messages: list[dict[str, Any]] = []
        images: list[EncodedImage] = []
        if (length := sum(len(text) for message in request.messages for text in _texts(message))) > (
            self.limits.characters
        ):
            raise bad(
                f"the messages have {length} characters; at most {self.limits.characters} are taken",
                "messages",
                "context_length_exceeded",
            )
        for index, message in enumerate(request.messages):
            where = f"messages.{index}.content"
            self._refuse_special(message, where)
            content: Any = message.content
            if isinstance(message.content, list):
                content = []
                for place, part in enumerate(message.content):
                    if isinstance(part, TextPart):
                        content.append({"type": "text", "text": part.text})
                        continue
                    if message.role != "user":
                        raise bad("only a user's message may hold images", where)
                    if len(images) == self.limits.images:
                        raise bad(f"more than {self.limits.images} images", where, "too_many_images")
                    images.append(open_image(part.image_url.url, f"{where}.{place}.image_url", self.limits))
                    if sum(image.height * image.width for image in images) > self.limits.pixels:
                        raise bad(
                            f"the images have more than {self.limits.pixels} pixels together", where, "image_too_large"
                        )
                    content.append({"type": "image"})
                if message.role != "user":  # templates take the text of others as it stands
                    content = "".join(part["text"] for part in content)
            messages.append({"role": message.role, "content": content})
        return messages, images

    def build(self, request: ChatRequest) -> Prompt:
        """The prompt of a request. Decodes images: call it on a thread.

        Raises:
            ApiError: 400, and what is wrong.
        """
        messages, images = self.open(request)
        try:
            grids = [self.patcher.grid(np.broadcast_to(np.uint8(0), (i.height, i.width, 3))) for i in images]
        except ValueError as error:  # sides of more than 200 to 1
            raise bad(f"an image can't be cut into patches ({error})", "messages", "invalid_image") from error
        token_ids = self._expand(self._tokenise(messages), [t * h * w // self.patcher.merge**2 for t, h, w in grids])
        wanted = request.wanted_tokens or 1
        if len(token_ids) + wanted > self.context:
            raise bad(
                f"the model's context is {self.context} tokens; the messages have {len(token_ids)} and the answer may "
                f"have {wanted}",
                "messages",
                "context_length_exceeded",
            )
        return Prompt(token_ids, grids, [decode_image(image) for image in images])

    def _refuse_special(self, message: ChatMessage, where: str) -> None:
        refused = self._never_said if message.role == "assistant" else self._special
        for text in _texts(message):
            if found := refused.search(text):
                raise bad(f"{found[0]} is a special token of the model and can't be part of a text", where)

    def _tokenise(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of the whole chat, one placeholder an image.

        Answers are rendered as marks, and encoded by themselves: as the ledger has them, no token reaches over the
        border of an answer and no template edits it.
        """
        mark = f"ANSWER{secrets.token_hex(8)}"  # no text of a client can hold it
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        marked = [{**m, "content": mark} if m["role"] == "assistant" else m for m in messages]
        try:
            rendered = self.template.tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise bad(f"the model's chat template refuses the messages ({error})", "messages") from error
        pieces = rendered.split(mark)
        if len(pieces) != len(answers) + 1:
            raise bad("the model's chat template leaves out an answer of these messages", "messages")
        ids = list(self._encode(pieces[0]))
        for answer, piece in zip(answers, pieces[1:], strict=True):
            ids += self._encode(answer)
            ids += self._encode(piece)
        return ids

    def _encode(self, text: str) -> tuple[int, ...]:
        # What comes again and again is short; kept long texts would be memory that clients fill.
        return self._encode_short(text) if len(text) <= _SHORT else self._encode_long(text)

    def _encode_long(self, text: str) -> tuple[int, ...]:
        return tuple(self.template.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _expand(self, ids: list[int], counts: list[int]) -> list[int]:
        """Puts as many placeholders as an image has visual tokens where the template has one (truth 2)."""
        image = self.template.image_token_id
        if ids.count(image) != len(counts):
            raise bad("the model's chat template does not show every image of these messages", "messages")
        expanded: list[int] = []
        of_each = iter(counts)
        for token in ids:
            expanded += [image] * next(of_each) if token == image else [token]
        return expanded


def _texts(message: ChatMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [part.text for part in message.content if isinstance(part, TextPart)]


def _any_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts)))
