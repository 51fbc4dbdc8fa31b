// Concatenated in the order of SCRIPTS in web/app.py; all top-level names are shared.
//
// The board: shows a task, lets the person rank it, sends the ranking and shows the next task from the answer.

const ROUTE = '/board';
const find = selector => element.querySelector(selector);
let task = null, isAdjudication = false, rubric = '', ranking = newRanking(0), items = [], shownAt = 0, busy = false, isAsked = false;
const durations = [];

const say = message => { find('.rb-live').textContent = message; };
const saved = message => { find('.rb-saved').textContent = message; };
function complain(message) {
  find('.rb-error').textContent = message;
  find('.rb-error').hidden = !message;
  find('.rb-sign-in').hidden = message !== SIGNED_OUT;
}

// ------------------------------------------------------------------ showing

function show(screen) {
  cancelDraft(); // what was changed while waiting for this screen is kept in this browser
  ({ board, annotator } = screen);
  task = screen.task;
  find('.rb-who').textContent = annotator;
  for (const part of ['.rb-password', '.rb-sign-out']) find(part).hidden = !screen.has_sign_in;
  find('.rb-lead').hidden = !screen.may_lead;
  find('.rb-ask').hidden = !screen.has_live;
  find('.rb-progress').textContent = screen.done === undefined ? '' : `${screen.done} done${pace()}`;
  showRubric(screen.rubric || { version: '' });
  find('.rb-work').hidden = !task;
  find('.rb-empty').hidden = Boolean(task);
  find('.rb-empty span').textContent = screen.nothing_left;
  showLink(find('.rb-empty a'), screen.may_lead && screen.lead_link);
  for (const name of ['skip', 'all-bad', 'submit']) find(`[data-act=${name}]`).disabled = !task;
  find('[data-act=undo]').disabled = false;
  askToConfirm(false);
  if (task) showTask(screen);
  lookAgain();
}

function showRubric({ version, html }) {
  const wide = matchMedia('(min-width: 1400px)').matches;
  find('[data-act=rubric]').hidden = !version || wide;
  if (version === rubric) return;
  rubric = version;
  setHtml(find('.rb-rubric .rb-text'), html);
  // A new rubric is opened once; after that each person decides.
  const seen = readStorage('rubric') === version;
  find('.rb-rubric').hidden = !version || (seen && !wide);
  writeStorage('rubric', version);
}

function pace() {
  if (durations.length < 3) return '';
  const middle = [...durations].sort((a, b) => a - b)[Math.floor(durations.length / 2)];
  return ` · ${Math.round(middle / 1000)} s each`;
}

function showTask(screen) {
  find('.rb-prompt').replaceChildren(...buildPrompt(task.prompt));
  const opinions = screen.opinions || [];
  isAdjudication = opinions.length > 0;
  find('.rb-opinions').hidden = !isAdjudication;
  find('.rb-opinions ol').replaceChildren(...opinions.map(buildOpinion));
  const flags = screen.flags || [];
  items = task.cards.map((content, card) => buildCard(card, content, flags));
  find('.rb-list').replaceChildren();
  find('.rb-unranked-list').replaceChildren();
  const local = readStorage(`draft:${task.ticket}`);
  const draft = local && (local.at || 0) >= ((task.draft && task.draft.at) || 0) ? local : task.draft;
  ranking = draft ? fromState(draft, items.length, flags) : newRanking(items.length);
  find('.rb-note').value = ranking.note;
  find('.rb-reasons').replaceChildren(...(screen.skip_reasons || []).map((reason, index) => {
    const choice = button('rb-button', `${index + 1}  ${reason}`, 'reason');
    choice.dataset.value = reason;
    return choice;
  }));
  find('.rb-again').hidden = !task.counts;
  saved(draft && !task.counts ? 'Draft restored' : '');
  window.scrollTo(0, 0);
  paint(ranking.order.length ? ranking.order[0].card : null);
  shownAt = performance.now() - ((draft && draft.spent_ms) || 0);
}

function paint(focusCard) {
  glide(items, () => {
    find('.rb-list').append(...ranking.order.map(item => items[item.card]));
    find('.rb-unranked-list').append(...ranking.unranked.map(card => items[card]));
  });
  let rank = 0;
  ranking.order.forEach(({ card, relation }, index) => {
    if (index === 0 || relation !== TIE) rank += 1;
    paintCard(items[card], rank, relation, index === 0, ranking.flags.get(card) || [], false);
  });
  for (const card of ranking.unranked) paintCard(items[card], 0, BETTER, false, ranking.flags.get(card) || [], true);
  find('.rb-unranked').hidden = !ranking.unranked.length;
  find('[data-act=all-bad]').setAttribute('aria-pressed', String(ranking.allBad));
  showMoreButtons(items);
  selectCard(focusCard);
}

// The card gets the focus and the next key.
function selectCard(card) {
  if (card === null || card === undefined) return;
  for (const item of items) item.querySelector('.rb-card').tabIndex = -1;
  const box = items[card].querySelector('.rb-card');
  box.tabIndex = 0;
  box.focus({ preventScroll: true });
  const { top, bottom } = box.getBoundingClientRect();
  if (top < 0 || (bottom > window.innerHeight - 80 && top > window.innerHeight / 2)) box.scrollIntoView({ block: 'nearest' });
}

// ------------------------------------------------------------------ changing

function changed(card, message) {
  paint(card);
  if (message) say(message);
  keepDraft();
}

const spentMs = () => Math.round(performance.now() - shownAt);
const draftState = () => ({ ...toState(ranking), touched: ranking.touched, at: Date.now(), spent_ms: spentMs() });

const placeText = card => `${letterOf(card)} is at place ${indexOf(ranking, card) + 1} of ${ranking.order.length}`;

function moveTo(card, index) {
  moveCard(ranking, card, index);
  changed(card, placeText(card));
}

function dropOn(card, other, kind) {
  if (kind === 'tie') {
    tieWith(ranking, card, other);
    return changed(card, `${letterOf(card)} ties with ${letterOf(other)}`);
  }
  const from = indexOf(ranking, card), to = indexOf(ranking, other) + (kind === 'after' ? 1 : 0);
  return moveTo(card, from >= 0 && from < to ? to - 1 : to);
}

function setRelation(card, value) {
  const index = indexOf(ranking, card);
  if (index < 1) return;
  const item = ranking.order[index];
  item.relation = item.relation === value ? BETTER : value;
  ranking.touched = true;
  ranking.typedPlaces.clear();
  const above = letterOf(ranking.order[index - 1].card);
  const text = { tie: 'ties with', 0: 'is worse than', 1: 'is slightly worse than', 2: 'is clearly worse than', 3: 'is much worse than' };
  changed(card, `${letterOf(card)} ${text[item.relation]} ${above}`);
}

function cycleStrength(card) {
  const item = ranking.order[indexOf(ranking, card)];
  if (item) setRelation(card, { tie: 1, 0: 1, 1: 2, 2: 3, 3: 3 }[item.relation]);
}

function toggleRanked(card) {
  if (ranking.unranked.includes(card)) return moveTo(card, ranking.order.length);
  leaveOut(ranking, card);
  return changed(card, `${letterOf(card)} is not ranked`);
}

function toggleFlag(card, name) {
  const names = ranking.flags.get(card) || [];
  ranking.flags.set(card, names.includes(name) ? names.filter(other => other !== name) : [...names, name]);
  changed(null, `${letterOf(card)}: ${(ranking.flags.get(card)).join(', ') || 'no flags'}`);
}

function openFlags(card) {
  const flags = items[card].querySelector('.rb-flags');
  flags.hidden = !flags.hidden;
  if (flags.hidden) selectCard(card);
  else flags.firstChild.focus();
}

function toggleMore(card) {
  const text = items[card].querySelector('.rb-text'), more = items[card].querySelector('.rb-more');
  if (more.hidden) return;
  const open = text.classList.toggle('open');
  more.textContent = open ? 'Show less' : 'Show all';
  more.setAttribute('aria-label', `${more.textContent} of ${letterOf(card)}`);
}

function placeByDigit(card, number) {
  placeByNumber(ranking, card, number);
  const next = nextWithoutPlace(ranking, items.length);
  changed(next === undefined ? card : next, `${placeText(card)}${next === undefined ? '' : `; next ${letterOf(next)}`}`);
}

function toggleAllBad() {
  ranking.allBad = !ranking.allBad;
  changed(null, ranking.allBad ? 'All bad' : 'Not all bad');
}

// ------------------------------------------------------------------ sending

// Busy until the next task is shown, so that a second Ctrl+Enter does not submit twice.
async function whileBusy(work) {
  if (busy) return;
  busy = true;
  element.firstElementChild.classList.add('rb-busy');
  try {
    await work();
  } finally {
    busy = false;
    element.firstElementChild.classList.remove('rb-busy');
  }
}

async function send(payload) {
  cancelDraft();
  const { ticket } = task;
  const answer = await deliver({ id: newId(), ticket, note: ranking.note, ...payload }, complain);
  if (!answer.ok) return complain(answer.error);
  complain('');
  writeStorage(`draft:${ticket}`, null);
  if (isAdjudication) return location.assign('/lead/quality#differ');
  durations.push(spentMs());
  show(answer);
  say(payload.op === 'submit' ? 'Saved' : 'Skipped');
  if (answer.feedback) showFeedback(answer.feedback);
}

// Only training tasks give feedback; the letters are those of the task just submitted.
function showFeedback({ agreement, expected, explanation }) {
  const dialog = find('.rb-feedback');
  dialog.querySelector('h2').textContent = agreement === 1 ? 'Training: correct' : 'Training: another order was expected';
  const order = expected.map(tier => tier.map(letterOf).join(' = ')).join(' > ');
  dialog.querySelector('.rb-expected').textContent = `The expected order was ${order}.`;
  setHtml(dialog.querySelector('.rb-text'), explanation);
  dialog.showModal();
}

// Ask before submitting an order that was never changed: the key may have been pressed by mistake.
function askToConfirm(asked) {
  isAsked = asked;
  find('.rb-confirm').hidden = !asked;
  find('[data-act=submit]').textContent = asked ? 'Submit as shown' : 'Submit';
}

function submit() {
  if (!task || busy) return undefined;
  if (!ranking.order.length) return complain('Rank at least one response, or skip the task.');
  if (!ranking.touched && !ranking.allBad && !isAsked) return askToConfirm(true);
  return whileBusy(() => send({ op: 'submit', ...toState(ranking), rubric, duration_ms: spentMs() }));
}

function skip(reason) {
  find('.rb-skip').close();
  return task && whileBusy(() => send({ op: 'skip', reason, state: draftState() }));
}

// Open a finished task again. The draft of this one is saved before: the server shows what was changed last.
async function reopen(payload, message) {
  find('.rb-history').close();
  await saveDraft();
  const answer = await ask(payload);
  if (!answer.ok) return complain(answer.error);
  complain('');
  show(answer);
  say(message);
}

const undo = () => whileBusy(() => reopen({ op: 'undo' }, 'The last task is open again'));

async function showHistory() {
  const answer = await ask({ op: 'history' });
  if (!answer.ok) return complain(answer.error);
  find('.rb-past').replaceChildren(...answer.past.map(buildPast));
  find('.rb-history').showModal();
}

const openPast = ticket => whileBusy(() => reopen({ op: 'open', ticket }, 'The task is open again'));

async function start() {
  const wanted = new URLSearchParams(location.search).get('decide');
  let first = wanted ? { op: 'decide', task_id: Number(wanted) } : { op: 'next' };
  for (let attempt = 0; ; attempt += 1) {
    let screen = await ask(first);
    if (screen.ok) {
      ({ board, annotator } = screen);
      const hadWaiting = readStorage('outbox');
      complain(hadWaiting ? await deliverWaiting(complain) : '');
      history.replaceState(null, '', location.pathname);
      first = { op: 'next' };
      if (hadWaiting) screen = await ask(first);
      if (screen.ok) return show(screen);
    }
    complain(screen.error);
    if (!screen.retry) first = { op: 'next' };
    await pause(Math.min(10000, 500 * 2 ** attempt));
  }
}

// ------------------------------------------------------------------ input

const cardOf = node => { const item = node && node.closest && node.closest('.rb-item'); return item ? Number(item.dataset.card) : null; };

const actions = {
  submit, undo,
  'skip': () => task && find('.rb-skip').showModal(),
  'keys': () => find('.rb-keys').showModal(),
  'rubric': () => { find('.rb-rubric').hidden = !find('.rb-rubric').hidden; },
  'history': showHistory,
  'open': target => openPast(target.dataset.ticket),
  'close': target => target.closest('dialog').close(),
  'reason': target => skip(target.dataset.value),
  'all-bad': () => toggleAllBad(),
  'up': target => moveTo(cardOf(target), indexOf(ranking, cardOf(target)) - 1),
  'down': target => moveTo(cardOf(target), indexOf(ranking, cardOf(target)) + 1),
  'strength': target => setRelation(cardOf(target), target.dataset.value === TIE ? TIE : Number(target.dataset.value)),
  'flag': target => openFlags(cardOf(target)),
  'flag-name': target => { toggleFlag(cardOf(target), target.dataset.value); target.focus(); },
  'leave': target => toggleRanked(cardOf(target)),
  'more': target => toggleMore(cardOf(target)),
};

element.addEventListener('click', event => {
  const target = event.target.closest('[data-act]');
  if (target) return actions[target.dataset.act](target);
  const card = cardOf(event.target);
  if (card !== null && String(getSelection()) === '' && !event.target.closest('a, summary')) selectCard(card);
});
// Unfolded thinking may make a card too long to show; the event does not bubble.
element.addEventListener('toggle', () => showMoreButtons(items), true);
element.addEventListener('input', event => {
  if (event.target.matches('.rb-note') && task) { ranking.note = event.target.value; keepDraft(); }
});
element.addEventListener('pointerdown', startDrag);
element.addEventListener('pointermove', event => { if (drag) drag.y = event.clientY; });
element.addEventListener('pointerup', event => endDrag(event, dropOn));
element.addEventListener('pointercancel', event => endDrag(event, dropOn));

function stepFocus(card, step) {
  const cards = [...ranking.order.map(item => item.card), ...ranking.unranked];
  selectCard(cards[Math.max(0, Math.min(cards.length - 1, cards.indexOf(card) + step))]);
}

function onCardKey(event, card) {
  const number = Number(event.key);
  if (number >= 1 && number <= items.length) placeByDigit(card, number);
  else if (event.key === '=') setRelation(card, TIE);
  else if (event.key === '>') cycleStrength(card);
  else if (event.key === ' ') toggleMore(card);
  else if (event.key.toUpperCase() === 'X') toggleRanked(card);
  else if (event.key.toUpperCase() === 'F') openFlags(card);
  else if (event.key === 'ArrowUp' || event.key === 'ArrowDown') {
    const step = event.key === 'ArrowUp' ? -1 : 1;
    if (event.altKey) moveTo(card, indexOf(ranking, card) + step);
    else stepFocus(card, step);
  } else return false;
  return true;
}

function onBoardKey(event) {
  const letter = event.key.length === 1 ? event.key.toUpperCase().charCodeAt(0) - 65 : -1;
  if (letter >= 0 && letter < items.length && !event.shiftKey) selectCard(letter);
  else if (event.key.toUpperCase() === 'S') actions.skip();
  else if (event.key.toUpperCase() === 'U') undo();
  else if (event.key.toUpperCase() === 'H') showHistory();
  else if (event.key.toUpperCase() === 'N') find('.rb-note').focus();
  else if (event.key === '?') actions.keys();
  else return false;
  return true;
}

function onKey(event) {
  if (!element.isConnected) return document.removeEventListener('keydown', onKey);
  if (event.isComposing) return undefined;
  const dialog = find('dialog[open]');
  if (dialog) {
    const reason = dialog.matches('.rb-skip') && dialog.querySelectorAll('[data-act=reason]')[Number(event.key) - 1];
    if (reason) { event.preventDefault(); reason.click(); }
    return undefined;
  }
  if ((event.ctrlKey || event.metaKey) && event.key === 'Enter') {
    event.preventDefault();
    return event.repeat ? undefined : submit(); // holding the key down does not confirm
  }
  if (isAsked && event.key === 'Escape') { askToConfirm(false); return selectCard(ranking.order[0].card); }
  if (event.target.matches('textarea, input')) { if (event.key === 'Escape') selectCard(0); return undefined; }
  if (event.ctrlKey || event.metaKey) return undefined;
  // Space and Enter belong to a button that has the focus.
  if (event.target.matches('button, summary') && (event.key === ' ' || event.key === 'Enter')) return event.repeat ? event.preventDefault() : undefined;
  const card = cardOf(document.activeElement);
  const sixthIsF = event.key.toUpperCase() === 'F' && items.length > 5 && !event.shiftKey;
  if (task && card !== null && !sixthIsF && onCardKey(event, card)) return event.preventDefault();
  if (onBoardKey(event)) event.preventDefault();
  return undefined;
}
document.addEventListener('keydown', onKey);

function onResize() {
  if (!element.isConnected) return window.removeEventListener('resize', onResize);
  return showMoreButtons(items);
}
window.addEventListener('resize', onResize);

start();
