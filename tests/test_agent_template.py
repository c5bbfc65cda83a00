"""The ledger's tokens are those of the model's own template, appended and never rewritten."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.agent.ledger import StopReason, Trajectory
from clew.envs.base import Task
from clew.errors import UserError
from clew.policy.model import VisionLanguageModel, load_model

FOLDERS = {"tiny": tiny.tiny_folder, "qwen": tiny.qwen_folder}
_LOADED: dict[str, VisionLanguageModel] = {}


def loaded(name: str) -> VisionLanguageModel:
    if name not in _LOADED:
        _LOADED[name] = load_model(FOLDERS[name]())
    return _LOADED[name]


def whole(vlm: VisionLanguageModel, trajectory: Trajectory, opening_text: str, answers: list[str]) -> list[int]:
    """Ids of the rendered conversation up to the last answer's end, placeholders expanded by the grids."""
    messages = []
    texts = [opening_text, *(turn.text for turn in trajectory.turns[1:])]
    for text, answer in zip(texts, answers, strict=True):
        messages.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]})
        messages.append({"role": "assistant", "content": answer})
    rendered = vlm.tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered.endswith("<|im_end|>\n")
    pieces = rendered.removesuffix("\n").split("<|image_pad|>")
    assert len(pieces) == len(trajectory.grids) + 1
    text = pieces[0]
    for (t, h, w), piece in zip(trajectory.grids, pieces[1:], strict=True):
        text += "<|image_pad|>" * (t * h * w // vlm.merge_size**2) + piece
    return vlm.tokenizer(text, add_special_tokens=False)["input_ids"]


# Answers as a model may write them; a leading line break would merge with the one that the template ends on.
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: "<|" not in text and not text[0].isspace()
)
answers_st = st.lists(
    st.one_of(words, st.sampled_from(["<action>up</action>", "<think>a</think>b"])), min_size=1, max_size=4
)


@pytest.mark.parametrize("name", FOLDERS)
@settings(max_examples=40, deadline=None)
@given(answers=answers_st, data=st.data())
def test_pieces_add_up_to_the_rendered_conversation(name: str, answers: list[str], data: st.DataObject) -> None:
    """Opening + sampled answers + continuations == tokenising all of it at once."""
    vlm = loaded(name)
    # The tiny tokenizer normalises to NFC; so must what we compare.
    answers = [vlm.tokenizer.decode(vlm.tokenizer(a, add_special_tokens=False)["input_ids"]) for a in answers]
    trajectory = Trajectory(Task("test", 0, "t"), 0)
    for i, answer in enumerate(answers):
        size = data.draw(st.sampled_from([(64, 64), (64, 96), (128, 64)]))
        text = data.draw(st.sampled_from(["Moved.", "Blocked by a wall.", "", "Two\nlines \n", "  spaced  "]))
        tiny.show(vlm, trajectory, tiny.noise(i, *size), text)
        tiny.reply(vlm, trajectory, answer)
    opening_text = "Look at it." + ("\n" + trajectory.turns[0].text if trajectory.turns[0].text else "")
    assert trajectory.token_ids == whole(vlm, trajectory, opening_text, answers)
    vlm_image = vlm.template.image_token_id
    trajectory.check_images(vlm_image, vlm.merge_size)
    # Exactly the answers and their ends carry loss.
    spans = [vlm.tokenizer.decode(trajectory.token_ids[t.start : t.end]) for t in trajectory.turns]
    assert spans == [a + "<|im_end|>" for a in answers]
    assert sum(trajectory.sampled) == sum(t.end - t.start for t in trajectory.turns)
    assert all(all(trajectory.sampled[t.start : t.end]) for t in trajectory.turns)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_cut_answer_gets_the_templates_end_of_turn(name: str) -> None:
    """The end of turn that the model did not sample is inserted, as a prompt token: no loss on it."""
    vlm = loaded(name)
    template = vlm.template
    ended, cut = (template.continuation("Moved.", 4, ended=e) for e in (True, False))
    assert cut == [template.end_of_turn_id, *ended]
    trajectory = Trajectory(Task("test", 0, "t"), 0)
    tiny.show(vlm, trajectory, tiny.noise(0), "")
    ids = vlm.tokenizer("up up", add_special_tokens=False)["input_ids"]
    trajectory.append_sampled(ids, [-0.5] * len(ids))
    tiny.show(vlm, trajectory, tiny.noise(1), "Moved.", ended=False)
    tiny.reply(vlm, trajectory, "down")
    assert trajectory.token_ids == whole(vlm, trajectory, "Look at it.", ["up up", "down"])
    at = [i for i, token in enumerate(trajectory.token_ids) if token == template.end_of_turn_id]
    assert [trajectory.sampled[i] for i in at] == [False, False, False, True]  # user, cut, user, sampled
    assert [trajectory.logprobs[i] for i, s in enumerate(trajectory.sampled) if s][: len(ids)] == [-0.5] * len(ids)


@pytest.mark.parametrize("name", FOLDERS)
def test_prefix_extension(name: str) -> None:
    """Each turn only appends: the record of turn n is a prefix of the record of turn n + 1."""
    vlm = loaded(name)
    trajectory = Trajectory(Task("test", 0, "t"), 0)
    before: tuple[list[int], list[bool], list[float]] = ([], [], [])
    for i in range(4):
        tiny.show(vlm, trajectory, tiny.noise(i), "Moved.")
        tiny.reply(vlm, trajectory, "up")
        now = (trajectory.token_ids, trajectory.sampled, trajectory.logprobs)
        for old, new in zip(before, now, strict=True):
            assert new[: len(old)] == old and len(new) > len(old)
        assert len({len(x) for x in now}) == 1
        before = tuple(list(x) for x in now)  # type: ignore[assignment]


def test_special_text_in_an_observation_is_refused() -> None:
    template = loaded("tiny").template
    with pytest.raises(UserError, match="placeholder"):
        template.continuation("look: <|image_pad|>", 4, ended=True)
    with pytest.raises(ValueError, match="log-probabilities"):
        Trajectory(Task("test", 0, "t"), 0).append_sampled([1, 2], [0.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("<|im_end|>", "</s>"), "end of turn"),
        (lambda text: text.replace("<|image_pad|>", ""), "image placeholder"),
        (lambda text: text.replace("<|image_pad|>", "<|image_pad|><|image_pad|>"), "image placeholder"),
    ],
)
def test_templates_that_cannot_be_appended_to_are_named(
    tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(tiny.tiny_folder(), folder)
    template = folder / "chat_template.jinja"
    template.write_text(change(template.read_text()))
    with pytest.raises(UserError, match=message):
        load_model(folder).template.continuation("Moved.", 4, ended=True)


def test_infrastructure_is_not_the_agents_fault() -> None:
    blamed = {reason for reason in StopReason if not reason.infrastructure}
    assert blamed == {"success", "wrong_end", "turn_cap", "turn_tokens", "trajectory_tokens"}
