// What the lead's pages share: forms that send JSON, what the server says, pages renewed in place.
// It runs before the page is there: a form that is sent at once must not reload the page and lose what was typed.
const all = selector => [...document.querySelectorAll(selector)];
const one = selector => document.querySelector(selector);

function say({ say = '', error = '', link = '', copy = link && location.origin + link, of = '' }) {
  one('.said').textContent = say;
  one('.problem').textContent = error;
  // What is shown only once stays until it is copied; what a newer one has made void goes.
  for (const box of all('.secret')) if ('copied' in box.dataset || (of && box.dataset.of === of)) box.remove();
  if (copy) showSecret(say, copy, of, link);
  else if (say || error) one(error ? '.problem' : '.said').scrollIntoView({ block: 'nearest' });
}

const isLocal = () => ['127.0.0.1', 'localhost', '[::1]'].includes(location.hostname);

function showSecret(said, copy, of, link) {
  const box = one('#secret').content.cloneNode(true).firstElementChild;
  const field = box.querySelector('input');
  box.dataset.of = of;
  box.querySelector('p').textContent = said;
  field.ariaLabel = said;
  field.value = copy;
  box.querySelector('.local').hidden = !link || !isLocal();
  one('.said').textContent = '';
  one('.secrets').prepend(box);
  field.select();
}

async function answerOf(response) {
  const said = response && await response.json().catch(() => null);
  if (!said) return { error: 'The server does not answer. Try again.' };
  return response.ok ? said : { error: said.error || 'The request is malformed. Reload the page.' };
}

async function post(address, payload) {
  const response = await fetch(address, {
    method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(payload),
  }).catch(() => null);
  return answerOf(response);
}

// Puts the page's newest content in place of what is shown, unless `isHeld` says to leave it.
async function renew(isHeld = () => false) {
  const answer = await fetch(location.href).catch(() => null);
  if (!answer || !answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), 'text/html').querySelector('#content');
  if (!fresh || isHeld()) return;
  const scrolled = new Map(all('.scroll').map(box => [box.ariaLabel, box.scrollLeft]));
  const focused = document.activeElement && document.activeElement.id;
  one('#content').replaceWith(document.adoptNode(fresh));
  for (const box of all('.scroll')) box.scrollLeft = scrolled.get(box.ariaLabel) || 0;
  if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
}

// The fields of a form; those named in its `data-lists` are lists, one entry for each that is chosen.
function fieldsOf(form, button) {
  const data = new FormData(form, button);
  const lists = (form.dataset.lists || '').split(' ');
  const fields = Object.fromEntries([...data].filter(([name]) => !lists.includes(name)));
  for (const name of lists) if (name) fields[name] = data.getAll(name);
  return fields;
}

document.addEventListener('submit', async event => {
  const form = event.target;
  if (!form.hasAttribute('action')) event.preventDefault();
  if (!form.dataset.post) return;
  if (form.ariaBusy) return;
  form.ariaBusy = 'true';
  const said = await post(form.dataset.post, fieldsOf(form, event.submitter));
  form.ariaBusy = null;
  if (!said.error) {
    if (!('keep' in form.dataset)) form.reset();
    await renew();
  }
  say(said);
});

document.addEventListener('click', async event => {
  if (!event.target.matches('[data-act=copy]')) return;
  const field = event.target.closest('.secret').querySelector('input');
  field.select();
  // Without https a page has no clipboard.
  const copying = navigator.clipboard ? navigator.clipboard.writeText(field.value) : Promise.reject();
  await copying.catch(() => document.execCommand('copy'));
  markCopied(field);
});

const markCopied = field => {
  const box = field.closest('.secret');
  box.dataset.copied = '';
  box.querySelector('button').textContent = 'Copied';
};
document.addEventListener('copy', event => { if (event.target.matches?.('.secret input')) markCopied(event.target); });
