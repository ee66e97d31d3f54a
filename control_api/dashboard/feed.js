// Server-sent events over fetch, which can carry a token; taken up again at the last message.

import { Refused, Unreachable, delayBefore, open, pause } from "./api.js";

// The server writes a comment every 15 s: silence for longer means that the line is dead.
const LONGEST_SILENCE = 45_000;

/** Splits chunks of text into messages {event, id, data}; comments are left out. */
export class MessageParser {
  #rest = "";
  #fields = {};

  push(chunk) {
    const messages = [];
    const lines = (this.#rest + chunk).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) this.#take(line.endsWith("\r") ? line.slice(0, -1) : line, messages);
    return messages;
  }

  #take(line, messages) {
    if (line === "") {
      if ("data" in this.#fields) messages.push(this.#fields);
      this.#fields = {};
      return;
    }
    const colon = line.indexOf(":");
    if (colon <= 0) return;
    const [name, value] = [line.slice(0, colon), line.slice(colon + 1).replace(/^ /, "")];
    this.#fields[name] = name === "data" && "data" in this.#fields ? `${this.#fields.data}\n${value}` : value;
  }
}

/**
 * Hands every message after `cursor` to `receive(kind, data)`, over restarts of the server, until `signal` is aborted
 * or the run is gone; then `gone()`. While nobody looks, nothing is asked for.
 */
export async function follow(path, cursor, { receive, gone, signal }) {
  let attempt = 0;
  while (!signal.aborted) {
    try {
      for await (const message of messages(path, cursor, signal)) {
        attempt = 0;
        if (message.event === "deleted") return gone();
        receive(message.event, JSON.parse(message.data));
        cursor = message.id;
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 404) return gone();
      const isExpected = error instanceof Refused || error instanceof Unreachable || error.name === "AbortError";
      if (!isExpected) throw error;
    }
    await pause(delayBefore(attempt), signal);
    attempt += 1;
    await visible(signal);
  }
}

async function* messages(path, cursor, signal) {
  const line = new AbortController();
  const hangUp = () => line.abort();
  const hangUpWhenHidden = () => document.hidden && hangUp();
  signal.addEventListener("abort", hangUp);
  document.addEventListener("visibilitychange", hangUpWhenHidden);
  let watchdog = setTimeout(hangUp, LONGEST_SILENCE);
  try {
    const response = await open(path, { headers: { "Last-Event-ID": cursor }, signal: line.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new MessageParser();
    for (;;) {
      // A line that broke is one that ended: the next one starts at the cursor.
      const { done, value } = await reader.read().catch(() => ({ done: true }));
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(hangUp, LONGEST_SILENCE);
      yield* parser.push(value);
    }
  } finally {
    clearTimeout(watchdog);
    signal.removeEventListener("abort", hangUp);
    document.removeEventListener("visibilitychange", hangUpWhenHidden);
    hangUp();
  }
}

async function visible(signal) {
  while (document.hidden && !signal.aborted) {
    await new Promise((resolve) => {
      document.addEventListener("visibilitychange", resolve, { once: true });
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}
