// Requests to the control API: the token, trying again, refusals as errors.

const TOKEN_KEY = "slipstream-token";
const TRIES = 6;
const FIRST_DELAY = 400;
const LONGEST_DELAY = 4000;

/** The API answered, and said no. `problem` is its RFC 9457 body. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The server answered with status ${status}.`);
    this.status = status;
    this.reason = problem.reason || "";
    this.errors = problem.errors || [];
    this.traceId = problem.trace_id || "";
  }
}

/** Nothing answered, or something between us and the API did. */
export class Unreachable extends Error {}

/** Says `lost` and `back`: whether the API answers. */
export const connection = new EventTarget();
let isLost = false;

function report(lost) {
  if (lost === isLost) return;
  isLost = lost;
  connection.dispatchEvent(new Event(lost ? "lost" : "back"));
}

// ---- token

let wantToken = null;
let pendingToken = null;

/** `ask(wasRefused)` resolves with what the person typed. */
export function askForTokenWith(ask) {
  wantToken = ask;
}

export function keepToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

async function newToken(used) {
  const current = sessionStorage.getItem(TOKEN_KEY);
  // Another request has asked in the meantime.
  if (current !== used) return;
  pendingToken ??= wantToken(used !== null).finally(() => {
    pendingToken = null;
  });
  keepToken(await pendingToken);
}

// ---- requests

/** Waits; sooner when `signal` is aborted. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** Doubles up to a few seconds. */
export function delayBefore(attempt) {
  return Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** attempt);
}

/**
 * The response, once it is a success.
 * @throws {Refused|Unreachable}
 */
export async function open(path, { headers = {}, ...options } = {}) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN_KEY);
    const authorization = token === null ? {} : { Authorization: `Bearer ${token}` };
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...headers, ...authorization }, cache: "no-store" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      report(true);
      throw new Unreachable("The control API does not answer.");
    }
    if (response.status === 401) {
      await newToken(token);
      continue;
    }
    if (response.ok) {
      report(false);
      return response;
    }
    throw await refusal(response);
  }
}

async function refusal(response) {
  const isProblem = (response.headers.get("content-type") || "").startsWith("application/problem+json");
  if (!isProblem && response.status >= 502) {
    report(true);
    return new Unreachable(`Something before the control API answers with status ${response.status}.`);
  }
  report(false);
  const problem = isProblem ? await response.json().catch(() => ({})) : {};
  return new Refused(response.status, problem);
}

/** The body of a GET. */
export async function get(path, signal) {
  const response = await open(path, { signal });
  try {
    return await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    report(true);
    throw new Unreachable("The control API left in the middle of an answer.");
  }
}

/** Every page of a list; `found(items)` is called with each. */
export async function pages(path, member, found, signal, size = 1000) {
  let token = "";
  do {
    const body = await get(`${path}?page_size=${size}&page_token=${encodeURIComponent(token)}`, signal);
    found(body[member]);
    token = body.next_page_token;
  } while (token && !signal?.aborted);
}

/** All items of a list. */
export async function all(path, member, signal) {
  const items = [];
  await pages(path, member, (page) => items.push(...page), signal);
  return items;
}

/** A key for one change; `send` with the same key twice changes nothing the second time. */
export function newKey() {
  // Not randomUUID: that exists on https and loopback only.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** POST, tried again with the same key while nothing answers. */
export async function send(path, body, key = newKey()) {
  const options = { method: "POST", headers: { "Idempotency-Key": key } };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  for (let attempt = 0; ; attempt += 1) {
    try {
      return await (await open(path, options)).json();
    } catch (error) {
      if (error instanceof Refused || attempt + 1 >= TRIES) throw error;
      await pause(delayBefore(attempt));
    }
  }
}

export const runPath = (name, rest = "") => `/v1/runs/${encodeURIComponent(name)}${rest}`;

// ---- again and again

/**
 * Calls `task` now and every so often until `signal` is aborted; not while nobody looks.
 * What goes wrong is given to `failed`; an API that is away is only waited for.
 */
export async function poll(task, milliseconds, signal, failed) {
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        await task();
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof Unreachable)) failed(error);
      }
    }
    await pauseWhileHidden(milliseconds, signal);
  }
}

async function pauseWhileHidden(milliseconds, signal) {
  await pause(milliseconds, signal);
  while (document.hidden && !signal.aborted) {
    await new Promise((resolve) => {
      document.addEventListener("visibilitychange", resolve, { once: true });
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}
