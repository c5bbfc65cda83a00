// One model's walk: what was received of it, and how a moment of it is shown.

const ARROWS = { up: "\u2191", down: "\u2193", left: "\u2190", right: "\u2192", stop: "\u25a0" };

export class Side {
  constructor(element, seek) {
    this.name = element.dataset.side === "0" ? "Left" : "Right";
    this.seek = seek;
    const find = (selector) => element.querySelector(selector);
    this.model = find("select");
    this.picture = find(".frame");
    this.badge = find(".badge");
    this.turn = find(".turn");
    this.answer = find(".answer");
    this.feedback = find(".feedback");
    this.list = find(".turns");
    this.reset();
  }

  reset(frame = "") {
    this.frame = frame; // before the first turn
    this.turns = [];
    this.end = null;
    this.maxTurns = 0;
    this.walking = false;
    this.list.replaceChildren();
  }

  get last() {
    return this.turns.length;
  }

  take(event) {
    if (event.event === "start") {
      this.reset(event.frame);
      this.walking = true;
      this.maxTurns = event.max_turns;
    } else if (event.event === "turn") {
      this.turns.push(event);
      this.list.append(this.item(event, this.last));
    } else {
      this.finish(event.event === "end" ? event : { solved: false, words: event.message });
    }
  }

  finish(end) {
    this.walking = false;
    this.end = end;
    if (end.solved && this.last) this.list.lastChild.classList.replace("no", "yes");
  }

  item(turn, number) {
    const item = document.createElement("li");
    item.className = turn.feedback === "moved" ? "" : "no";
    const button = document.createElement("button");
    button.type = "button";
    const move = document.createElement("b");
    move.textContent = ARROWS[turn.action] ?? turn.action ?? "?";
    const words = document.createElement("span");
    words.textContent = [turn.action, turn.feedback].filter(Boolean).join(": ") || "no move";
    button.append(move, words);
    button.title = turn.answer;
    button.addEventListener("click", () => this.seek(number));
    item.append(button);
    return item;
  }

  // Shows the moment after `at` turns, or the last one that there is.
  show(at) {
    const now = Math.min(at, this.last);
    const turn = this.turns[now - 1];
    const frames = [this.frame, ...this.turns.slice(0, now).map((t) => t.frame)].filter(Boolean);
    const frame = frames.at(-1);
    if (frame) this.picture.src = `data:image/png;base64,${frame}`;
    else this.picture.removeAttribute("src");
    this.picture.alt = frame ? `${this.name} model: the picture after ${now} turns` : "";
    const over = this.end !== null && now === this.last;
    this.badge.textContent = over ? this.verdict() : this.walking || this.last ? "Walking" : "Ready";
    this.badge.className = `badge ${over ? (this.end.solved ? "yes" : "no") : ""}`;
    this.turn.textContent = this.maxTurns ? `turn ${now} of at most ${this.maxTurns}` : "";
    this.answer.textContent = turn?.answer ?? "";
    this.answer.hidden = !turn;
    this.feedback.textContent = turn?.feedback ?? "";
    [...this.list.children].forEach((item, index) => {
      item.firstChild.toggleAttribute("aria-current", index + 1 === now);
      item.classList.toggle("later", index + 1 > now);
    });
  }

  verdict() {
    return this.end.solved ? `Solved in ${this.last} turns` : this.end.words;
  }
}
