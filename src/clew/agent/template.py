"""A chat template as token ids that are only ever appended.

A model's own template renders whole conversations as text. An agent needs two pieces of it: the opening (up to
where the first answer begins) and the continuation (from the end of an answer to where the next one begins).
Both are cut out of what the template renders, tokenised once, and appended to the ledger: nothing that was
sampled is ever decoded and encoded again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from clew.errors import UserError

_ANSWER = "CLEWANSWER"  # stands for the sampled answer while the template is cut


class ChatTemplate:
    """Token ids of the pieces of a chat, for a Hugging Face tokenizer with a chat template.

    Attributes:
        end_of_turn_id: the token that ends an answer (``<|im_end|>`` for Qwen).
        image_token_id: the placeholder that stands for one visual token.
    """

    def __init__(self, tokenizer: Any, image_token: str = "<|image_pad|>", end_of_turn: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.end_of_turn = end_of_turn or tokenizer.eos_token
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        self.image_token_id: int = tokenizer.convert_tokens_to_ids(image_token)
        if not tokenizer.chat_template:
            raise UserError("model.path: the folder has no chat template (chat_template.jinja); take one that chats")
        if self.image_token_id is None or self.image_token_id == tokenizer.unk_token_id:
            raise UserError(f"model.path: the tokenizer has no {image_token} token; take a Qwen3-VL folder")
        self._pieces = lru_cache(maxsize=512)(self._tokenise)

    def opening(self, prompt: str, text: str, n_image_tokens: int) -> list[int]:
        """Ids of the first user turn (image, instructions, observation text) up to the first answer."""
        return self._expand(self._pieces("opening", opening_text(prompt, text)), n_image_tokens)

    def continuation(self, text: str, n_image_tokens: int, *, ended: bool) -> list[int]:
        """Ids between two answers: the rest of the last turn, the new observation, the head of the next answer.

        Args:
            ended: the model sampled its end of turn itself, so the template's copy of it is left out.
        """
        ids = self._expand(self._pieces("continuation", text), n_image_tokens)
        return ids[1:] if ended else ids

    def _expand(self, ids: tuple[int, ...], n_image_tokens: int) -> list[int]:
        at = ids.index(self.image_token_id)
        return [*ids[:at], *[self.image_token_id] * n_image_tokens, *ids[at + 1 :]]

    def _tokenise(self, kind: str, text: str) -> tuple[int, ...]:
        user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        if kind == "opening":
            rendered = self._render([user])
        else:
            first = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ""}]}
            whole = self._render([first, {"role": "assistant", "content": _ANSWER}, user])
            rendered = whole[whole.index(_ANSWER) + len(_ANSWER) :]
            if not rendered.startswith(self.end_of_turn):
                raise UserError("model.path: the chat template does not end an answer with the tokenizer's end of turn")
        ids = tuple(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if ids.count(self.image_token_id) != 1:
            raise UserError("model.path: the chat template does not render exactly one image placeholder an image")
        return ids

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def opening_text(prompt: str, text: str) -> str:
    """What the first user turn says: the instructions, then the text of the first observation if it has any."""
    return f"{prompt}\n{text}" if text else prompt
