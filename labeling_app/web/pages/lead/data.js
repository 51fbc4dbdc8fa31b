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

// Lines that are no JSON are prompts.
function pastedFile(text) {
  const lines = text.split('\n').map(line => line.trim()).filter(Boolean)
    .map(line => (line.startsWith('{') ? line : JSON.stringify({ prompt: line })));
  return new File([lines.join('\n')], 'pasted.jsonl');
}

async function send(file) {
  const begun = await post('/lead/data/upload', { name: file.name, size: file.size });
  if (begun.error) return begun;
  for (let at = 0; at < file.size; at += begun.piece) {
    progress(`Uploading ${file.name} …`, at / file.size);
    const body = file.slice(at, at + begun.piece);
    const sent = await answerOf(
      await fetch(`/lead/data/upload/${begun.id}/${at}`, { method: 'POST', body }).catch(() => null));
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

function show(found, name) {
  const lines = `${found.lines.toLocaleString('en')} ${found.lines === 1 ? 'line' : 'lines'}`;
  preview.querySelector('h3').textContent =
    `${name}: ${found.is_whole ? lines : `the first ${lines}`}, ${found.bad_lines.toLocaleString('en')} bad`;
  const bad = preview.querySelector('.bad');
  bad.replaceChildren(...found.first_bad.map(text => cell(bad, text, 'li')));
  bad.hidden = preview.querySelector('.choice').hidden = !found.bad_lines;
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
  const file = one('#file').files[0] || (pasted && pastedFile(pasted));
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
  await follow();
  event.target.disabled = false;
});

async function follow() {
  for (;;) {
    const state = await answerOf(await fetch('/lead/data/import').catch(() => null));
    if (state.over === false) {
      progress(`Importing: ${state.rows.toLocaleString('en')} rows so far. People see none until all are there.`, null);
      await new Promise(resolve => setTimeout(resolve, 500));
      continue;
    }
    progress('');
    if (!state.error) {
      preview.hidden = true;
      one('.choose').reset();
      await renew();
    }
    return say(state);
  }
}
