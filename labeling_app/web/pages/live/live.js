// Live mode: the person asks, answers stream in blind, the person judges, and the conversation continues with the best.
// Votes wait in the outbox until the server has stored them, which it does once the answers are complete.

const ROUTE = '/live';
const find = selector => document.querySelector(selector);
const box = find('#prompt'), better = find('#better');
let turn = null, cards = [], running = false, sending = false, failed = null, askId = null, votes = Promise.resolve();
// The person's votes on the question on the page; the server's answer replaces them.
let verdict = { thumbs: [], choice: null };

const say = message => { find('.saved').textContent = message; };
function complain(message, canTryAgain = false) {
  find('.problem p').textContent = message;
  find('.problem').hidden = !message;
  find('[data-act=again]').hidden = !canTryAgain;
  find('.sign-in').hidden = message !== SIGNED_OUT;
}

// ------------------------------------------------------------------ showing

function show(shown, count) {
  turn = shown;
  cards = Array.from({ length: count }, (_, place) => buildCard(place));
  find('.talk').replaceChildren(...turn.prompt.map(buildTurn));
  find('.cards').replaceChildren(...cards);
  showPicks(cards.map(buildPick));
  find('.empty').hidden = true;
  closeEdit();
  verdict = { thumbs: cards.map(() => 0), choice: null };
  paint();
}

function showPicks(picks) {
  document.querySelectorAll('.pick').forEach(node => node.remove());
  find('.votes').prepend(...picks);
  find('.votes').hidden = find('.answers').hidden = !picks.length;
}

function showDone(shown) {
  if (!turn || turn.id !== shown.id) show(shown, shown.cards.length);
  const mine = verdict;
  turn = shown;
  paintDone(cards, shown.cards);
  paintNotes(cards, shown.notes);
  find('.edited').hidden = !shown.edit;
  find('.edited .text').innerHTML = shown.edit || '';
  // Votes that are still being sent stay as the person cast them.
  const waiting = (readStorage('outbox') || []).filter(vote => vote.turn === shown.id);
  verdict = waiting.length ? mine : { thumbs: shown.thumbs, choice: shown.choice };
  paint();
}

function paint() {
  paintVerdict(cards, verdict);
  paintVotes(haveWords(cards));
  find('[data-act=stop]').hidden = !running;
  find('[data-act=edit]').disabled = running || verdict.choice === null;
  find('.ask .primary').disabled = running || sending;
}

const markFirst = () => { if (cards.length) cards[0].focus({ preventScroll: true }); };

// ------------------------------------------------------------------ asking

async function send() {
  const text = box.value.trim();
  if (!text || running || sending) return;
  if (turn && verdict.choice === null && !turn.edit) {
    complain('Pick an answer first: the conversation continues with it. Or start a new conversation.');
    return;
  }
  sending = true;
  complain('');
  paint();
  await votes;
  askId = askId || newId(); // a repetition has the same id: the first request may have arrived
  const answer = await ask({ op: 'ask', id: askId, text, after: turn && turn.id });
  sending = false;
  if (!answer.retry) askId = null;
  if (answer.ok) {
    follow(answer.running);
  } else {
    paint();
    complain(answer.error, answer.error !== SIGNED_OUT);
  }
}

// Show answers as they arrive; after a lost connection, continue where they are.
async function follow(question) {
  running = true;
  failed = null;
  box.value = ''; // storage keeps it until it is answered
  show(question, question.texts.length);
  say('The models are answering …');
  markFirst();
  window.scrollTo(0, document.body.scrollHeight);
  let last = null;
  for (let attempt = 0; !last; attempt += 1) {
    last = await readStream(question.id).catch(() => null);
    if (!last) await pause(Math.min(5000, 500 * 2 ** attempt));
  }
  running = false;
  if (last.turn) {
    if (!box.value) writeStorage('prompt', null);
    showDone(last.turn);
    say('The answers are complete');
    window.dispatchEvent(new Event('online')); // sends waiting votes at once
  } else {
    withdraw(last.problem || 'The server has lost the question. Send it again.', question);
  }
}

// Put an unanswered question back into the box, and the conversation back to where it was.
async function withdraw(problem, question) {
  const waiting = readStorage('outbox') || [];
  writeStorage('outbox', waiting.filter(vote => vote.turn !== question.id));
  failed = question.id;
  const state = await ask({ op: 'state' });
  const earlier = state.ok && question.prompt.length > 1 ? state.turn : null;
  if (earlier) { turn = null; showDone(earlier); } else clear();
  box.value = [question.asked, box.value].filter(Boolean).join('\n\n');
  say('');
  complain(problem, true);
  box.focus();
}

async function readStream(id) {
  const answer = await fetch(`/live/stream/${encodeURIComponent(id)}`);
  if (answer.status === 401) complain(SIGNED_OUT);
  if (!answer.ok) return null;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return null;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.over) return event;
      paintTexts(cards, event.texts, event.thinking);
      paintVotes(haveWords(cards));
    }
  }
}

function clear() {
  turn = null;
  cards = [];
  verdict = { thumbs: [], choice: null };
  find('.talk').replaceChildren();
  find('.cards').replaceChildren();
  showPicks([]);
  find('.empty').hidden = false;
  paint();
}

function startAnew() {
  if (running) return;
  clear();
  complain('');
  say('');
  box.focus();
}

// ------------------------------------------------------------------ judging

// One after the other: two quick clicks could arrive in the wrong order.
function vote(payload) {
  complain('');
  paint();
  const cast = { id: newId(), turn: turn.id, ...payload };
  writeStorage('outbox', [...(readStorage('outbox') || []), cast]);
  const stored = votes.then(() => bring(cast));
  votes = stored;
  return stored;
}

async function bring(cast) {
  const answer = await deliver(cast, message => { if (cast.turn !== failed) say(message); });
  if (cast.turn === failed) return false;
  if (!answer.ok) { complain(answer.error); return false; }
  if (turn && turn.id === cast.turn) showDone(answer.turn);
  say('Saved');
  return true;
}

// Send the votes cast before a reload.
async function bringWaiting() {
  const refused = await deliverWaiting(say);
  if (refused) complain(refused);
  const state = await ask({ op: 'state' });
  if (state.ok && state.turn && turn && turn.id === state.turn.id) showDone(state.turn);
}

function pick(choice) {
  if (!turn || !haveWords(cards)) return;
  verdict = { ...verdict, choice };
  vote({ op: 'pick', choice });
}

function thumb(place, value) {
  if (!haveWords(cards)) return;
  const now = verdict.thumbs[place] === value ? 0 : value;
  verdict = { ...verdict, thumbs: verdict.thumbs.map((old, index) => (index === place ? now : old)) };
  vote({ op: 'thumb', place, value: now });
}

const best = () => (typeof verdict.choice === 'number' ? verdict.choice : 0);

function openEdit() {
  if (find('[data-act=edit]').disabled) return;
  better.value = turn.cards[best()].text || '';
  find('.edit').hidden = false;
  find('.ask').hidden = true;
  better.focus();
  find('.edit').scrollIntoView({ block: 'nearest' });
}

function closeEdit() {
  find('.edit').hidden = true;
  find('.ask').hidden = false;
}

async function saveEdit() {
  complain('');
  if (await vote({ op: 'edit', place: best(), text: better.value })) { closeEdit(); box.focus(); }
}

// ------------------------------------------------------------------ input

const placeOf = node => Number(node.dataset.place);
const actions = {
  'up': node => thumb(placeOf(node), 1),
  'down': node => thumb(placeOf(node), -1),
  'pick': node => pick(placeOf(node)),
  'tie': () => pick('tie'),
  'all-bad': () => pick('all-bad'),
  'edit': openEdit,
  'cancel': () => { closeEdit(); cards[best()].focus(); },
  'stop': () => { if (running) ask({ op: 'stop', turn: turn.id }); },
  'new': startAnew,
  'again': send,
  'keys': () => find('dialog').showModal(),
  'close': () => find('dialog').close(),
};

document.addEventListener('click', event => {
  const target = event.target.closest('[data-act]');
  if (target) actions[target.dataset.act](target);
});
find('.ask').addEventListener('submit', event => { event.preventDefault(); send(); });
find('.edit').addEventListener('submit', event => { event.preventDefault(); saveEdit(); });
box.addEventListener('input', () => writeStorage('prompt', box.value || null));

function onTextKey(event) {
  const sends = event.target === box ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (event.key === 'Enter' && sends) { event.preventDefault(); event.target.form.requestSubmit(); }
  if (event.key === 'Escape') { if (event.target === better) closeEdit(); markFirst(); }
}

function onCardKey(event, place) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) cards[Math.max(0, Math.min(cards.length - 1, place + step))].focus();
  else if (event.key === '+') thumb(place, 1);
  else if (event.key === '-') thumb(place, -1);
  else return false;
  return true;
}

function onPageKey(event) {
  const key = event.key.toUpperCase(), place = key.length === 1 ? key.charCodeAt(0) - 65 : -1;
  if (place >= 0 && place < cards.length) pick(place);
  else if (key === '=' && turn) pick('tie');
  else if (key === 'X' && turn) pick('all-bad');
  else if (key === 'E') openEdit();
  else if (key === 'S') actions.stop();
  else if (key === 'N') startAnew();
  else if (key === '/') box.focus();
  else if (key === '?') actions.keys();
  else return false;
  return true;
}

document.addEventListener('keydown', event => {
  if (event.isComposing || find('dialog').open) return;
  if (event.target.matches('textarea')) { onTextKey(event); return; }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const place = cards.indexOf(event.target.closest('.card'));
  if ((place >= 0 && onCardKey(event, place)) || onPageKey(event)) event.preventDefault();
});

async function start() {
  for (let attempt = 0; ; attempt += 1) {
    const state = await ask({ op: 'state' });
    if (state.ok) {
      ({ board, annotator } = state);
      find('.who').textContent = annotator;
      find('.sign-out').hidden = !state.has_sign_in;
      complain('');
      box.value = readStorage('prompt') || box.value; // which was typed before this ran
      if (state.running) await follow(state.running);
      else if (state.turn) showDone(state.turn);
      if (readStorage('outbox')) await bringWaiting();
      return;
    }
    complain(state.error);
    await pause(Math.min(10000, 500 * 2 ** attempt));
  }
}

start();
