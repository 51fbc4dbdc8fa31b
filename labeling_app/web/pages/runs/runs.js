// Keeps the Runs page up to date and sends what its buttons ask for. All state is the server's.
const REFRESH_MS = 2000;
const ADDRESS = '/lead/runs';
const state = one('#state');
const shown = new Map(); // the server's text of each part, as it was last shown
const edited = () => all('#values [name]').filter(field => field.value !== field.dataset.saved);
let upToDateAt = new Date();

// The log shows its end, unless somebody has scrolled away from it.
const isAtEnd = box => box.scrollHeight - box.scrollTop - box.clientHeight < 20;

// Replaces the parts whose text has changed, but not the settings while somebody edits them.
function replaceParts(text) {
  const fresh = new DOMParser().parseFromString(text, 'text/html');
  const parts = [...fresh.querySelectorAll('[data-part]')];
  const names = parts.map(part => part.dataset.part);
  for (const old of all('#state > [data-part]')) if (!names.includes(old.dataset.part)) old.remove();
  parts.forEach((part, place) => {
    const name = part.dataset.part;
    const old = one(`#state > [data-part="${name}"]`);
    const hasFocus = old && old.contains(document.activeElement);
    if (old && shown.get(name) === part.outerHTML) return;
    if (old && name === 'settings' && (hasFocus || edited().length)) return;
    shown.set(name, part.outerHTML);
    const wanted = hasFocus ? focusAfter(document.activeElement) : [];
    const opened = old ? [...old.querySelectorAll('details[open]')].map(({ id }) => id) : [];
    const log = old && old.querySelector('pre');
    const scrolled = log && !isAtEnd(log) ? log.scrollTop : null;
    if (old) old.replaceWith(document.adoptNode(part));
    else state.insertBefore(document.adoptNode(part), all('#state > [data-part]')[place] || null);
    for (const details of part.querySelectorAll('details')) details.open = opened.includes(details.id);
    for (const box of part.querySelectorAll('pre')) box.scrollTop = scrolled ?? box.scrollHeight;
    const target = wanted.map(id => document.getElementById(id)).find(Boolean);
    if (target && target.matches(':is(h2, h3)')) target.tabIndex = -1;
    if (target) target.focus({ preventScroll: true });
  });
}

// The ids of what gets the focus when a part is replaced, the best first: the element itself, what
// takes its place, the heading above it.
function focusAfter(element) {
  const around = element.closest('[aria-labelledby]');
  return [element.id, element.dataset.next, around && around.getAttribute('aria-labelledby')].filter(Boolean);
}

// What is shown stays while the server is away or cannot answer, and the page says since when.
async function refresh() {
  const answer = await fetch(`${ADDRESS}/state`).catch(() => null);
  if (answer && answer.status === 401) { location.assign('/sign-in'); return; }
  if (answer && answer.ok) {
    replaceParts(await answer.text());
    upToDateAt = new Date();
    sayOld('');
    return;
  }
  const { detail, error } = (answer && await answer.json().catch(() => null)) || {};
  sayOld(`This page shows what was true at ${upToDateAt.toLocaleTimeString()}. `
    + (answer ? detail || error || `The server answers with an error (${answer.status}).` : 'The server does not answer.'));
}

function sayOld(text) {
  if (one('#old').textContent !== text) one('#old').textContent = text; // the same is not read out again
}

function valueOf(field) {
  const text = field.value.trim();
  if (text === '') return null;
  if (field.dataset.kind === 'yes or no') return text === 'yes';
  if (field.dataset.kind === 'choice') return text;
  return Number.isNaN(Number(text)) ? text : Number(text);
}

state.addEventListener('click', async event => {
  const button = event.target.closest('button[data-op]');
  if (!button || button.ariaDisabled) return;
  button.ariaDisabled = 'true'; // until the answer is there: one press, one request
  const { op, now, round, setting, wait } = button.dataset;
  if (wait) say({ say: wait }); // a process is started, which takes seconds
  const said = await post(ADDRESS, { op, now: now === 'yes', round: round && Number(round), setting });
  say(said);
  button.ariaDisabled = null;
  if (setting && !said.error) showFileValue(button);
  await refresh();
});

// The other fields stay, also those that somebody is editing.
function showFileValue(button) {
  const field = button.closest('.setting').querySelector('[name]');
  field.value = field.dataset.saved = button.dataset.file;
  field.focus();
  button.closest('p').remove();
}

state.addEventListener('submit', async event => {
  event.preventDefault();
  const kept = one('#kept');
  const fields = edited(); // the others stay those of the file
  if (!fields.length) { kept.textContent = 'Nothing has changed.'; return; }
  kept.textContent = 'Checking …';
  const sent = fields.map(field => field.value);
  const values = Object.fromEntries(fields.map(field => [field.name, valueOf(field)]));
  const said = await post(ADDRESS, { op: 'change', values });
  say(said);
  kept.textContent = said.error ? '' : 'Saved.';
  if (!said.error) fields.forEach((field, place) => { field.dataset.saved = sent[place]; });
});

for (const box of all('#state pre')) box.scrollTop = box.scrollHeight;
setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
