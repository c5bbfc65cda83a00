// The page: what to watch, two walks that come in while they are shown, and playback over what has come.

import { get, Refusal, useKey, walk } from "./api.js";
import { Side } from "./side.js";

const BEAT_MS = 700; // a turn, at speed 1
const $ = (id) => document.getElementById(id);
const sides = [...document.querySelectorAll(".side")].map((element) => new Side(element, seek));

let setup;
let at = 0; // turns shown
let playing = false;
let timer = 0;
let running = new AbortController(); // the walks and pictures on their way
let before = ""; // what was walked last, and how often
let attempt = 0;

// --- playback --------------------------------------------------------------------------------------------

function last() {
  return Math.max(...sides.map((side) => side.last));
}

function coming() {
  return sides.some((side) => side.walking);
}

function show() {
  sides.forEach((side) => side.show(at));
  $("seek").max = last();
  $("seek").value = at;
  $("at").textContent = `turn ${at} of ${last()}${coming() ? " so far" : ""}`;
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  $("play").classList.toggle("playing", playing);
  const none = last() === 0 && !coming();
  for (const id of ["restart", "back", "play", "step", "seek"]) $(id).disabled = none;
}

function seek(turn) {
  pause();
  at = Math.max(0, Math.min(turn, last()));
  show();
}

function play() {
  if (at >= last() && !coming()) at = 0;
  playing = true;
  clearTimeout(timer);
  timer = setTimeout(beat, BEAT_MS / Number($("speed").value));
  show();
}

function pause() {
  playing = false;
  clearTimeout(timer);
}

function beat() {
  if (at < last()) at += 1;
  if (at >= last() && !coming()) pause();
  else timer = setTimeout(beat, BEAT_MS / Number($("speed").value));
  show();
}

$("play").addEventListener("click", () => {
  if (playing) pause();
  else play();
  show();
});
$("restart").addEventListener("click", () => seek(0));
$("back").addEventListener("click", () => seek(at - 1));
$("step").addEventListener("click", () => seek(at + 1));
$("seek").addEventListener("input", () => seek(Number($("seek").value)));
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, button") || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = { " ": "play", ArrowLeft: "back", ArrowRight: "step", Home: "restart" }[event.key];
  if (!button) return;
  event.preventDefault();
  $(button).click();
});

// --- what is watched -------------------------------------------------------------------------------------

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function refused(error) {
  if (error.name === "AbortError") return;
  if (error instanceof Refusal && error.status === 401) {
    ready(false);
    notice($("key").value ? "The server refuses this key." : "");
    $("key").focus();
  } else {
    notice(error.message);
  }
}

function ready(yes) {
  for (const id of ["choices", "walks"]) $(id).hidden = !yes;
  $("key-form").hidden = yes;
}

function halt() {
  running.abort();
  running = new AbortController();
  pause();
  at = 0;
}

function suite() {
  return setup.suites[$("suite").selectedIndex];
}

async function picture() {
  halt();
  notice("");
  $("index").max = suite().size - 1;
  $("range").textContent = `0 to ${suite().size - 1}`;
  sides.forEach((side) => side.reset());
  if (!$("index").reportValidity()) return show();
  const place = new URLSearchParams({ suite: suite().name, index: $("index").value });
  try {
    const found = await get(`maze?${place}`, running.signal);
    $("prompt").textContent = found.prompt;
    const length = found.path_length ? `The shortest way takes ${found.path_length} turns; ` : "";
    $("facts").textContent = `${length}${length ? "at" : "At"} most ${found.max_turns} are allowed.`;
    sides.forEach((side) => side.reset(found.frame));
  } catch (error) {
    refused(error);
  }
  show();
}

async function start() {
  halt();
  notice("");
  const wanted = { suite: suite().name, index: Number($("index").value), mode: $("mode").value };
  const what = JSON.stringify([wanted, ...sides.map((side) => side.model.value)]);
  attempt = what === before && wanted.mode === "sampled" ? (attempt + 1) % 10000 : 0;
  before = what;
  const { signal } = running;
  sides.forEach((side) => {
    side.reset(side.frame);
    side.walking = true;
  });
  play();
  await Promise.all(sides.map((side) => one(side, { ...wanted, attempt, model: side.model.value }, signal)));
}

async function one(side, wanted, signal) {
  try {
    await walk(wanted, signal, (event) => {
      if (signal.aborted) return;
      side.take(event);
      show();
    });
    if (!signal.aborted && !side.end) side.finish({ solved: false, words: "Not finished: the connection was lost" });
  } catch (error) {
    if (signal.aborted) return;
    side.finish({ solved: false, words: "Not finished" });
    refused(error);
  }
  if (signal.aborted) return;
  $("spoken").textContent += ` ${side.name} model: ${side.verdict()}.`;
  show();
}

function random() {
  const [number] = crypto.getRandomValues(new Uint32Array(1));
  $("index").value = number % suite().size;
  picture();
}

$("choices").addEventListener("submit", (event) => {
  event.preventDefault();
  $("spoken").textContent = "";
  start();
});
$("suite").addEventListener("change", picture);
$("index").addEventListener("change", picture);
$("random").addEventListener("click", random);

// --- the beginning ---------------------------------------------------------------------------------------

function fill(select, names) {
  select.replaceChildren(...names.map((name) => new Option(name, name)));
}

async function begin() {
  try {
    setup = await get("setup");
    const { models } = await get("models");
    ready(true);
    document.querySelectorAll("[data-noun]").forEach((element) => (element.textContent = setup.noun));
    fill($("suite"), setup.suites.map(({ name }) => name));
    $("mode").options[0].textContent = `Sampled, T = ${setup.temperature}`;
    sides.forEach((side) => fill(side.model, models));
    sides[1].model.selectedIndex = models.length - 1;
    await picture();
  } catch (error) {
    refused(error);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  begin();
});
sides.forEach((side) => side.model.addEventListener("change", picture));
begin();
