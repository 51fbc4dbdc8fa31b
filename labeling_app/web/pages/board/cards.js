// Concatenated in the order of SCRIPTS in web/app.py; all top-level names are shared.
//
// The cards on the page. Every element is built here; responses are inserted only as the server's sanitized HTML.

const STRENGTHS = [[TIE, 'Tie'], [1, 'Slightly better'], [2, 'Clearly'], [3, 'Much']];

function make(tag, className, text, attributes = {}) {
  const node = document.createElement(tag);
  node.className = className;
  if (text) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Set the server's sanitized HTML; a field that an older or newer server does not send is shown as nothing.
const setHtml = (node, html) => { node.innerHTML = html || ''; };

function button(className, text, action, label) {
  return make('button', className, text, { type: 'button', 'data-act': action, ...(label ? { 'aria-label': label } : {}) });
}

// A button with one symbol: its name is for screen readers and the tooltip.
function tool(sign, action, label) {
  const node = button('rb-tool', sign, action);
  setLabel(node, label);
  return node;
}

function setLabel(node, label) {
  node.setAttribute('aria-label', label);
  node.title = label;
}

function buildCard(card, content, flagNames) {
  const letter = letterOf(card);
  const item = make('li', 'rb-item');
  item.dataset.card = card;
  const gap = make('div', 'rb-gap', '', { role: 'group', 'aria-label': `How much better the card above is than ${letter}` });
  for (const [value, text] of STRENGTHS) {
    const choice = button('rb-strength', text, 'strength');
    choice.dataset.value = value;
    gap.append(choice);
  }
  const box = make('article', 'rb-card', '', { tabindex: '-1' });
  const grip = make('div', 'rb-grip', '', { 'aria-hidden': 'true' });
  grip.append(make('span', 'rb-rank'), make('span', 'rb-letter', letter), make('span', 'rb-dots', '⠿'));
  const text = make('div', 'rb-text');
  setHtml(text, content.html);
  const more = button('rb-quiet rb-more', 'Show all', 'more', `Show all of ${letter}`);
  more.hidden = true;
  const ending = make('p', 'rb-ending', content.ending);
  ending.hidden = !content.ending;
  const flags = make('div', 'rb-flags', '', { role: 'group', 'aria-label': `Flags of ${letter}` });
  flags.hidden = true;
  for (const name of flagNames) {
    const chip = button('rb-chip', name, 'flag-name');
    chip.dataset.value = name;
    flags.append(chip);
  }
  const body = make('div', 'rb-body');
  body.append(text, more, ending, flags);
  const tools = make('div', 'rb-tools');
  tools.append(
    tool('↑', 'up', `Move ${letter} up`), tool('↓', 'down', `Move ${letter} down`),
    tool('⚑', 'flag', `Flag ${letter}`), tool('✕', 'leave', `Leave ${letter} unranked`));
  box.append(grip, body, tools);
  item.append(gap, box);
  return item;
}

function buildPrompt(turns) {
  return turns.map(turn => {
    const node = make('div', `rb-turn rb-${turn.role}`);
    if (turns.length > 1) node.append(make('p', 'rb-role', turn.role));
    const text = make('div', 'rb-text');
    setHtml(text, turn.html);
    node.append(text);
    return node;
  });
}

function buildPast(past) {
  const item = make('li', ''), row = make('button', '', '', { type: 'button', 'data-act': 'open' });
  row.dataset.ticket = past.ticket;
  const clock = new Date(past.at * 1000).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
  row.append(make('time', '', clock), make('span', '', past.prompt), make('em', '', past.answer));
  item.append(row);
  return item;
}

function buildOpinion({ answer, flags = [], note }) {
  const item = make('li', '');
  item.append(make('b', '', answer), make('span', '', [...flags, note].filter(Boolean).join(' · ')));
  return item;
}

// Show a card's number, tie, strength and flags.
function paintCard(item, rank, relation, isTop, flags, isUnranked) {
  const card = Number(item.dataset.card), letter = letterOf(card), box = item.querySelector('.rb-card');
  item.classList.toggle('tied', relation === TIE && !isTop && !isUnranked);
  item.querySelector('.rb-gap').hidden = isTop || isUnranked;
  item.querySelector('.rb-rank').textContent = isUnranked ? '–' : rank;
  for (const choice of item.querySelectorAll('.rb-strength')) {
    choice.setAttribute('aria-pressed', String(choice.dataset.value === String(relation)));
  }
  for (const chip of item.querySelectorAll('.rb-chip')) {
    chip.setAttribute('aria-pressed', String(flags.includes(chip.dataset.value)));
  }
  if (flags.length) item.querySelector('.rb-flags').hidden = false;
  item.querySelector('[data-act=flag]').setAttribute('aria-pressed', String(flags.length > 0));
  const leave = item.querySelector('[data-act=leave]');
  leave.textContent = isUnranked ? '+' : '✕';
  setLabel(leave, isUnranked ? `Rank ${letter}` : `Leave ${letter} unranked`);
  const place = isUnranked ? 'not ranked' : `place ${rank}`;
  const tied = relation === TIE && !isTop && !isUnranked ? ', tied with the one above' : '';
  box.setAttribute('aria-label', `Response ${letter}, ${place}${tied}`);
}

// Animate cards to their new places, unless the person prefers less motion.
function glide(items, move) {
  const before = new Map(items.map(item => [item, item.getBoundingClientRect().top]));
  move();
  if (matchMedia('(prefers-reduced-motion: reduce)').matches) return;
  for (const item of items) {
    const distance = before.get(item) - item.getBoundingClientRect().top;
    if (distance && before.get(item)) {
      item.animate([{ transform: `translateY(${distance}px)` }, { transform: 'none' }], { duration: 140, easing: 'ease-out' });
    }
  }
}

function showMoreButtons(items) {
  for (const item of items) {
    const text = item.querySelector('.rb-text'), more = item.querySelector('.rb-more');
    more.hidden = !text.classList.contains('open') && text.scrollHeight <= text.clientHeight + 4;
  }
}

function showLink(node, link) {
  node.hidden = !link;
  if (link) [node.textContent, node.href] = link;
}
