// Concatenated in the order of SCRIPTS in web/app.py; all top-level names are shared.
//
// The ranking as data, independent of the page.
//
// `order` is best first. Each item is {card, relation}: card is the position in which the response was shown, and
// relation compares the one above with it: TIE, BETTER (by an unknown amount), 1 slightly, 2 clearly, 3 much better.
// `unranked` are the cards that are not ranked. `typedPlaces` are the numbers typed so far while placing cards by number.

const TIE = 'tie';
const BETTER = 0;

function newRanking(numCards) {
  const order = Array.from({ length: numCards }, (_, card) => ({ card, relation: BETTER }));
  return { order, unranked: [], typedPlaces: new Map(), flags: new Map(), allBad: false, note: '', touched: false };
}

const letterOf = card => String.fromCharCode(65 + card);
const indexOf = (ranking, card) => ranking.order.findIndex(item => item.card === card);

// Remove a card and keep the relations between the others.
function takeOut(ranking, card) {
  ranking.touched = true;
  const index = indexOf(ranking, card);
  if (index < 0) {
    ranking.unranked = ranking.unranked.filter(other => other !== card);
    return;
  }
  const [item] = ranking.order.splice(index, 1);
  const next = ranking.order[index];
  if (next && item.relation !== TIE) next.relation = next.relation === TIE ? item.relation : BETTER;
  resetTop(ranking);
}

function resetTop(ranking) {
  if (ranking.order.length) ranking.order[0].relation = BETTER;
}

// Insert a card at an index; `tied` ties it with the one above. A card inserted inside a tie joins it.
function putIn(ranking, card, index, tied) {
  const next = ranking.order[index];
  const insideTie = next && next.relation === TIE;
  ranking.order.splice(index, 0, { card, relation: tied || insideTie ? TIE : BETTER });
  if (next && !insideTie) next.relation = BETTER;
  resetTop(ranking);
}

function moveCard(ranking, card, index, tied = false) {
  takeOut(ranking, card);
  putIn(ranking, card, Math.max(0, Math.min(ranking.order.length, index)), tied);
  ranking.typedPlaces.clear();
}

// A card dropped on another joins the end of that card's tie.
function tieWith(ranking, card, other) {
  takeOut(ranking, card);
  let index = indexOf(ranking, other) + 1;
  while (index < ranking.order.length && ranking.order[index].relation === TIE) index += 1;
  putIn(ranking, card, index, true);
  ranking.typedPlaces.clear();
}

function leaveOut(ranking, card) {
  takeOut(ranking, card);
  ranking.unranked.push(card);
  ranking.typedPlaces.clear();
}

// Place cards by number: equal numbers tie, and cards without a number fill the remaining places.
function placeByNumber(ranking, card, number) {
  if (ranking.unranked.includes(card)) moveCard(ranking, card, ranking.order.length);
  ranking.touched = true;
  ranking.typedPlaces.set(card, number);
  const typed = [...ranking.typedPlaces].sort((a, b) => a[1] - b[1]);
  const waiting = ranking.order.map(item => item.card).filter(other => !ranking.typedPlaces.has(other));
  const order = [];
  while (typed.length || waiting.length) {
    if (typed.length && (typed[0][1] <= order.length + 1 || !waiting.length)) {
      const [first, value] = typed.shift();
      order.push({ card: first, relation: BETTER });
      while (typed.length && typed[0][1] === value) order.push({ card: typed.shift()[0], relation: TIE });
    } else {
      order.push({ card: waiting.shift(), relation: BETTER });
    }
  }
  ranking.order = order;
}

const nextWithoutPlace = (ranking, numCards) => Array.from({ length: numCards }, (_, card) => card)
  .find(card => !ranking.typedPlaces.has(card) && !ranking.unranked.includes(card));

function tiersOf(ranking) {
  const tiers = [];
  for (const { card, relation } of ranking.order) {
    if (tiers.length && relation === TIE) tiers[tiers.length - 1].push(card);
    else tiers.push([card]);
  }
  return tiers;
}

// What is stored and drafted. "All bad" with an unchanged order is stored as one tie.
function toState(ranking) {
  const onlyBad = ranking.allBad && !ranking.touched;
  const tiers = onlyBad ? [ranking.order.map(item => item.card)] : tiersOf(ranking);
  const strengths = ranking.order.slice(1).map(item => item.relation).filter(relation => relation !== TIE);
  return {
    tiers,
    strengths: !onlyBad && strengths.some(Boolean) ? strengths : [],
    flags: ranking.allBad ? ['all-bad'] : [],
    response_flags: [...ranking.flags].flatMap(([card, names]) => names.map(name => [card, name])),
    note: ranking.note,
  };
}

function fromState(state, numCards, flagNames) {
  const ranking = newRanking(numCards);
  const ranked = state.tiers.flat();
  if (ranked.some(card => !Number.isInteger(card) || card < 0 || card >= numCards)) return ranking;
  ranking.order = state.tiers.flatMap((tier, rank) => tier.map((card, place) => ({
    card, relation: place ? TIE : (rank && state.strengths[rank - 1]) || BETTER })));
  ranking.unranked = newRanking(numCards).order.map(item => item.card).filter(card => !ranked.includes(card));
  // A flag that is no longer offered can be neither shown nor stored.
  for (const [card, name] of state.response_flags.filter(([, name]) => flagNames.includes(name))) ranking.flags.set(card, [...(ranking.flags.get(card) || []), name]);
  ranking.allBad = state.flags.includes('all-bad');
  ranking.note = state.note;
  ranking.touched = state.touched !== false;
  return ranking;
}
