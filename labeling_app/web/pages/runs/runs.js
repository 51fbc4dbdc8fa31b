// Keeps the Runs page up to date and sends what its buttons ask for. All state is the server's.
const REFRESH_MS = 2000;
const ADDRESS = '/lead/runs';
const state = one('#state');
const shown = new Map(); // the server's text of each part, as it was last shown
let isEdited = false;

// Where the focus is, in words that survive a new text of the same part.
function focusedButton() {
  const { op, now, round } = document.activeElement.dataset;
  return op && { op, now, round };
}

function focusAgain({ op, now, round }) {
  const same = all('#state [data-op]').find(
    ({ dataset }) => dataset.op === op && dataset.now === now && dataset.round === round);
  if (same) same.focus();
}

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
    if (old && name === 'settings' && (isEdited || hasFocus)) return;
    shown.set(name, part.outerHTML);
    const button = hasFocus ? focusedButton() : null;
    const details = old && old.querySelector('details');
    const log = old && old.querySelector('pre');
    const scrolled = log ? log.scrollTop : 0;
    if (old) old.replaceWith(document.adoptNode(part));
    else state.insertBefore(document.adoptNode(part), all('#state > [data-part]')[place] || null);
    if (details && part.querySelector('details')) part.querySelector('details').open = details.open;
    if (log) part.querySelector('pre').scrollTop = scrolled;
    if (button) focusAgain(button);
  });
}

async function refresh() {
  const answer = await fetch(`${ADDRESS}/state`).catch(() => null); // away: what is shown stays
  if (answer && answer.ok) replaceParts(await answer.text());
  else if (answer && answer.status === 401) location.assign('/sign-in');
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
  const { op, now, round } = button.dataset;
  say(await post(ADDRESS, { op, now: now === 'yes', round: round && Number(round) }));
  button.ariaDisabled = null;
  await refresh();
});

state.addEventListener('input', () => { isEdited = true; });

state.addEventListener('submit', async event => {
  event.preventDefault();
  const kept = one('#kept');
  kept.textContent = 'Checking …';
  const fields = [...event.target.querySelectorAll('[name]')];
  const values = Object.fromEntries(fields.map(field => [field.name, valueOf(field)]));
  const said = await post(ADDRESS, { op: 'change', values });
  say(said);
  kept.textContent = said.error ? '' : 'Saved.';
  if (!said.error) isEdited = false;
});

setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
