// The few requests the page makes. Addresses are relative, so that the page may lie under any path.

let key = ""; // kept here alone: not stored, and gone with the tab

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(given) {
  key = given;
}

export async function ask(path, body, signal) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) };
  let response;
  try {
    response = await fetch(`api/${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server gives no answer. Is it still running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refusal(response.status, typeof said.error === "string" ? said.error : `The server answers ${response.status}.`);
}

export async function get(path, signal) {
  return (await ask(path, null, signal)).json();
}

// Calls `tell` with each event of a walk as it comes.
export async function walk(wanted, signal, tell) {
  const reader = (await ask("walk", wanted, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) tell(JSON.parse(line));
  }
}
