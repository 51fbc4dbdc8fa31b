// Upload in pieces, preview, import with progress. Texts of files are only ever set as text.
let upload = null;
const bar = one('progress');
const preview = one('.preview');

function progress(text, share) {
  one('.progress').textContent = text;
  bar.hidden = share === undefined;
  if (share === null) bar.removeAttribute('value');
  else if (share !== undefined) bar.value = share;
}

const asLine = item => JSON.stringify(typeof item === 'string' ? { prompt: item } : item);

function parsed(text) {
  try { return JSON.parse(text); } catch { return undefined; }
}

// Whether the first line is the head of a table: short names of columns, one of them for prompts, that tabs separate,
// as in cells copied from a spreadsheet, or commas or semicolons. The server tells which of these it is.
const PROMPT = /^(prompt|instruction|question|input|query|context)$/i;
function isTable(text) {
  const [head, ...rest] = text.trim().split('\n');
  const cells = head.split(/[,;\t]/).map(name => name.trim().replace(/^"(.*)"$/, '$1'));
  const areNames = cells.length > 1 && cells.every(name => name.length <= 40 && !/[?.!]/.test(name));
  const isEven = head.includes('\t') && rest.every(line => !line || line.split('\t').length === cells.length);
  return rest.length > 0 && areNames && (isEven || cells.some(name => PROMPT.test(name)));
}

// A table; one JSON array or object; or lines: those that are no JSON are prompts. An array stays as it is,
// so that its numbers do; a broken one is sent, too, and the server says where.
function pastedFile(text) {
  if (isTable(text)) return new File([text.replace(/^\n+/, '')], 'pasted.csv');
  const whole = parsed(text);
  if (whole && typeof whole === 'object' && !Array.isArray(whole) && !text.trim().includes('\n')) {
    return new File([text.trim()], 'pasted.jsonl');
  }
  const isBroken = whole === undefined && /^\[\s*\{/.test(text);
  if (isBroken || (Array.isArray(whole) && !whole.some(item => typeof item === 'string'))) {
    return new File([text], 'pasted.json');
  }
  const items = Array.isArray(whole) ? whole : whole && typeof whole === 'object' ? [whole] : null;
  const lines = items ? items.map(asLine) : text.split('\n').map(line => line.trim()).filter(Boolean)
    .map(line => (line.startsWith('{') ? line : asLine(line)));
  return new File([lines.join('\n')], 'pasted.jsonl');
}

const pause = ms => new Promise(resolve => setTimeout(resolve, ms));

// A piece that did not arrive is sent once more; the server skips one that did.
async function sendPiece(address, body) {
  const sent = () => fetch(address, { method: 'POST', body }).catch(() => null);
  const first = await sent();
  if (first && first.status < 500) return answerOf(first);
  await pause(1000);
  return answerOf(await sent());
}

async function send(file) {
  const begun = await post('/lead/data/upload', { name: file.name, size: file.size });
  if (begun.error) return begun;
  for (let at = 0; at < file.size; at += begun.piece) {
    progress(`Uploading ${file.name} …`, at / file.size);
    const body = file.slice(at, at + begun.piece);
    const sent = await sendPiece(`/lead/data/upload/${begun.id}/${at}`, body);
    if (sent.error) return sent;
  }
  return { id: begun.id, ...fieldsOf(one('.choose')) };
}

function cell(row, text, tag = 'td') {
  const added = document.createElement(tag);
  added.textContent = text;
  row.append(added);
  return added;
}

function list(where, texts) {
  where.replaceChildren(...texts.map(text => cell(where, text, 'li')));
  where.hidden = !texts.length;
}

const counted = (number, noun) => `${number.toLocaleString('en')} ${noun}${number === 1 ? '' : 's'}`;

function show(found, name) {
  const lines = counted(found.lines, 'line');
  preview.querySelector('h3').textContent =
    `${name}: ${found.is_whole ? lines : `the first ${lines}`}, ${found.bad_lines.toLocaleString('en')} bad`;
  list(preview.querySelector('.bad'), found.first_bad);
  for (const part of ['splits', 'read', 'ignored']) preview.querySelector(`.${part}`).textContent = found[part];
  preview.querySelector('.choice').hidden = found.is_whole && !found.bad_lines;
  const body = preview.querySelector('tbody');
  body.replaceChildren();
  for (const shown of found.rows) {
    const row = document.createElement('tr');
    cell(row, shown.line);
    cell(row, shown.prompt);
    const responses = cell(row, '');
    shown.responses.forEach((text, n) => cell(responses, `${String.fromCharCode(65 + n)}: ${text}`, 'div'));
    cell(row, shown.rankings.join('; '));
    cell(row, `${shown.split}, ${shown.source}`);
    body.append(row);
  }
  preview.hidden = false;
  preview.focus();
}

one('.choose').addEventListener('submit', async event => {
  event.preventDefault();
  const pasted = one('#pasted').value.trim();
  const chosen = one('#file').files[0];
  if (chosen && pasted) return say({ error: 'Choose a file or paste lines, not both.' });
  const file = chosen || (pasted && pastedFile(pasted));
  if (!file) return say({ error: 'Choose a file, or paste lines.' });
  say({});
  preview.hidden = true;
  const sent = await send(file);
  if (!sent.error) progress(`Reading ${file.name} …`, null);
  const found = sent.error ? sent : await post('/lead/data/preview', sent);
  progress('');
  if (found.error) return say(found);
  upload = sent;
  show(found, file.name);
});

preview.addEventListener('click', async event => {
  const act = event.target.dataset.act;
  if (act === 'cancel') preview.hidden = true;
  if (act !== 'import' || !upload) return;
  const leaveOut = one('#leave-out').checked ? 'yes' : '';
  const begun = await post('/lead/data/import', { ...upload, leave_out: leaveOut });
  if (begun.error) return say(begun);
  event.target.disabled = true;
  if ((await follow()).error) {
    preview.querySelector('.choice').hidden = false; // a bad line may lie beyond the preview
  } else {
    preview.hidden = true;
    one('.choose').reset();
  }
  event.target.disabled = false;
});

async function follow() {
  for (;;) {
    const state = await answerOf(await fetch('/lead/data/import').catch(() => null));
    if (state.over === false) {
      const read = `${Math.floor(100 * state.share)} % read`;
      progress(`Importing ${state.name}: ${read}, ${counted(state.rows, 'row')} stored. `
        + 'People see none until all are there.', state.share);
      await pause(500);
      continue;
    }
    progress('');
    if (!state.error) await renew();
    one('.last')?.remove();
    list(one('.left-out'), state.left_out || []);
    say(state);
    return state;
  }
}

// After a reload the page goes on following an import.
if ('running' in one('.progress').dataset) follow();
