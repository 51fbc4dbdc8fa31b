// Concatenated in the order of SCRIPTS in web/app.py, and a script of live mode; all top-level names are shared.
//
// Submissions wait in the browser's storage until the server has confirmed that they are stored.
// ROUTE is the address that the page sends requests to.

let board = '', annotator = '';
const SIGNED_OUT = 'You are signed out.';
const storageName = what => `rb:${board}:${annotator}:${what}`;

function readStorage(what) {
  try { return JSON.parse(localStorage.getItem(storageName(what))); } catch { return null; }
}

function writeStorage(what, value) {
  try {
    if (value === null) localStorage.removeItem(storageName(what));
    else localStorage.setItem(storageName(what), JSON.stringify(value));
  } catch { /* storage is full or forbidden: the server still has the draft */ }
}

function newId() {
  // crypto.randomUUID exists on https and localhost only.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, '0')).join('');
}

const pause = milliseconds => new Promise(done => {
  const timer = setTimeout(done, milliseconds);
  window.addEventListener('online', () => { clearTimeout(timer); done(); }, { once: true });
});

async function ask(payload) {
  // The name lets the server refuse this page's work once somebody else has signed in in this browser.
  const body = JSON.stringify(annotator ? { ...payload, annotator } : payload);
  const request = { method: 'POST', headers: { 'content-type': 'application/json' }, body };
  const answer = await fetch(ROUTE, request).catch(() => null);
  const content = answer && [200, 400, 403, 413, 503].includes(answer.status) ? await answer.json().catch(() => null) : null;
  if (content && ![403, 503].includes(answer.status)) return content;
  // No network, a restart, an exception or a refusal (403 and 503 say why): not stored yet.
  const problem = (content && content.error) || 'The server does not answer.';
  const error = answer && answer.status === 401 ? SIGNED_OUT : `${problem} Your work is kept in this browser and sent again.`;
  return { ok: false, retry: true, error };
}

// Send until the server answers. `report` is called with the reason for a delay.
async function deliver(payload, report) {
  const waiting = (readStorage('outbox') || []).filter(item => item.id !== payload.id);
  writeStorage('outbox', [...waiting, payload]);
  for (let attempt = 0; ; attempt += 1) {
    const answer = await ask(payload);
    if (answer.ok || !answer.retry) {
      const rest = (readStorage('outbox') || []).filter(item => item.id !== payload.id);
      writeStorage('outbox', rest.length ? rest : null);
      return answer;
    }
    report(answer.error);
    await pause(Math.min(10000, 500 * 2 ** attempt));
  }
}

// Returns why the last refused submission was refused: the person must know that it is not stored.
async function deliverWaiting(report) {
  let refused = '';
  for (const payload of readStorage('outbox') || []) {
    const answer = await deliver(payload, report);
    if (!answer.ok) refused = answer.error;
  }
  return refused;
}
