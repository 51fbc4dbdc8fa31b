// The elements of the page. Streaming text is inserted as textContent, complete text as the server's sanitized HTML.

const letterOf = place => String.fromCharCode(65 + place);

function make(tag, className, text, attributes = {}) {
  const node = document.createElement(tag);
  node.className = className;
  if (text) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function button(className, text, action, place, label) {
  const attributes = { type: 'button', 'data-act': action, 'data-place': place, 'aria-label': label, 'aria-pressed': 'false' };
  return make('button', className, text, attributes);
}

// Drawn, because many machines have no font with these symbols.
const THUMB = 'M3 10h4v11H3zM9 10l4-8c1.7 0 3 1.3 3 3l-1 4h6c1.1 0 2 1 1.7 2.2l-2 8c-.2 1-1.1 1.8-2.2 1.8H9z';

function thumbButton(direction, place) {
  const node = button(`thumb ${direction}`, '', direction, place, `Thumb ${direction} for ${letterOf(place)}`);
  const picture = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  picture.setAttribute('viewBox', '0 0 24 24');
  path.setAttribute('d', THUMB);
  picture.append(path);
  node.append(picture);
  return node;
}

function buildTurn({ role, html }) {
  const node = make('div', `turn ${role}`), text = make('div', 'text');
  text.innerHTML = html || '';
  node.append(make('p', 'role', role === 'user' ? 'you' : role), text);
  return node;
}

function buildCard(place) {
  const letter = letterOf(place), card = make('article', 'card', '', { tabindex: '-1', 'aria-label': `Answer ${letter}` });
  const header = make('header', 'judge');
  header.append(make('span', 'letter', letter, { 'aria-hidden': 'true' }), thumbButton('up', place), thumbButton('down', place));
  card.append(header, make('div', 'text coming'), make('p', 'ending', '', { hidden: '' }), make('p', 'note', '', { hidden: '' }));
  return card;
}

// Below the cards, where it stays in sight however long the answers are.
function buildPick(_, place) {
  const letter = letterOf(place), node = button('button pick', letter, 'pick', place, `${letter} is better`);
  node.append(make('span', 'wide', '\u00a0is better'));
  return node;
}

// Nobody can judge an answer before it has a word, beside its thinking.
const haveWords = cards => cards.every(card => card.querySelector('.text:not(.coming), .said'));

function paintVotes(areOpen) {
  const votes = '.pick, .thumb, [data-act=tie], [data-act=all-bad]';
  for (const node of document.querySelectorAll(votes)) node.disabled = !areOpen;
}

// While answers stream: plain text, and only what has changed. A model's thinking is folded.
function paintTexts(cards, texts, thinking) {
  texts.forEach((text, place) => {
    const node = cards[place].querySelector('.text');
    if (thinking[place]) paintPart(node, 'thought', thinking[place]);
    if (text) paintPart(node, 'said', text);
  });
}

function paintPart(node, name, text) {
  let part = node.querySelector(`.${name}`);
  if (!part) {
    part = make('div', name);
    node.append(name === 'thought' ? fold(part) : part);
  }
  if (part.textContent !== text) part.textContent = text;
}

function fold(part) {
  const folded = make('details', 'thinking');
  folded.append(make('summary', '', 'Thinking'), part);
  return folded;
}

function paintDone(cards, contents) {
  contents.forEach(({ html, ending }, place) => {
    const node = cards[place].querySelector('.text');
    node.classList.remove('coming');
    node.innerHTML = html || '';
    fill(cards[place].querySelector('.ending'), ending);
  });
}

function fill(node, text) {
  node.textContent = text || '';
  node.hidden = !text;
}

function paintNotes(cards, notes = []) {
  cards.forEach((card, place) => fill(card.querySelector('.note'), notes[place]));
}

const press = (node, pressed) => node.setAttribute('aria-pressed', String(pressed));

function paintVerdict(cards, { thumbs, choice }) {
  cards.forEach((card, place) => {
    card.classList.toggle('best', choice === place);
    press(card.querySelector('.up'), thumbs[place] === 1);
    press(card.querySelector('.down'), thumbs[place] === -1);
  });
  document.querySelectorAll('.pick').forEach((node, place) => press(node, choice === place));
  press(document.querySelector('[data-act=tie]'), choice === 'tie');
  press(document.querySelector('[data-act=all-bad]'), choice === 'all-bad');
}
