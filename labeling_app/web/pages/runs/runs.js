// Keeps the page up to date and sends what its buttons ask for. All state is the server's.
"use strict";

const REFRESH_MS = 2000;
const state = document.getElementById("state");
const problem = document.getElementById("problem");
const shown = new Map(); // the server's text of each part, as it was last shown
let edited = false;

const show = (text) => {
  problem.textContent = text;
  problem.hidden = !text;
};

// Where the focus is, in words that survive a new text of the same part.
const focused = () => {
  const { op, now, round } = document.activeElement?.dataset ?? {};
  return op && { op, now, round };
};

const focusAgain = (place) => {
  const same = [...state.querySelectorAll("[data-op]")].find(
    ({ dataset }) => dataset.op === place.op && dataset.now === place.now && dataset.round === place.round,
  );
  same?.focus();
};

const replaceParts = (text) => {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const parts = [...fresh.querySelectorAll("[data-part]")];
  const names = parts.map((part) => part.dataset.part);
  for (const old of [...state.querySelectorAll("[data-part]")]) {
    if (!names.includes(old.dataset.part)) old.remove();
  }
  parts.forEach((part, place) => {
    const name = part.dataset.part;
    const old = state.querySelector(`[data-part="${name}"]`);
    if (old && shown.get(name) === part.outerHTML) return;
    if (old && name === "settings" && (edited || old.contains(document.activeElement))) return;
    shown.set(name, part.outerHTML);
    const had = old && old.contains(document.activeElement) ? focused() : null;
    const opened = old?.querySelector("details")?.open;
    const scrolled = old?.querySelector("pre")?.scrollTop;
    if (old) old.replaceWith(part);
    else state.insertBefore(part, state.querySelectorAll("[data-part]")[place] ?? null);
    if (opened && part.querySelector("details")) part.querySelector("details").open = true;
    if (scrolled) part.querySelector("pre").scrollTop = scrolled;
    if (had) focusAgain(had);
  });
};

const refresh = async () => {
  try {
    const answer = await fetch("/runs/state");
    if (answer.ok) replaceParts(await answer.text());
    else if (answer.status === 401) location.assign("/sign-in");
  } catch {
    // The server is away: what is shown stays, and the next try comes.
  }
};

const send = async (payload) => {
  try {
    const answer = await fetch("/runs", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(payload),
    });
    const found = await answer.json();
    show(found.ok ? "" : found.error ?? found.detail ?? "The server refused that.");
    return Boolean(found.ok);
  } catch {
    show("The server cannot be reached. Try again.");
    return false;
  }
};

const valueOf = (field) => {
  const text = field.value.trim();
  if (text === "") return null;
  if (field.dataset.kind === "yes or no") return text === "yes";
  if (field.dataset.kind === "choice") return text;
  return Number.isNaN(Number(text)) ? text : Number(text);
};

state.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-op]");
  if (!button || button.getAttribute("aria-disabled")) return;
  button.setAttribute("aria-disabled", "true"); // until the answer is there: one press, one request
  const { op, now, round } = button.dataset;
  const payload = { op };
  if (now) payload.now = true;
  if (round) payload.round = Number(round);
  await send(payload);
  button.removeAttribute("aria-disabled");
  await refresh();
});

state.addEventListener("input", () => {
  edited = true;
});

state.addEventListener("submit", async (event) => {
  event.preventDefault();
  const kept = document.getElementById("kept");
  kept.textContent = "Checking …";
  const fields = [...event.target.querySelectorAll("[name]")];
  const values = Object.fromEntries(fields.map((field) => [field.name, valueOf(field)]));
  const done = await send({ op: "change", values });
  kept.textContent = done ? "Kept." : "";
  if (done) edited = false;
});

setInterval(() => {
  if (!document.hidden) refresh();
}, REFRESH_MS);
