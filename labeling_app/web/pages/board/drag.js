// Concatenated in the order of SCRIPTS in web/app.py; all top-level names are shared.
//
// Dragging with Pointer Events, the same for mouse, pen and finger (touch screens have no HTML5 drag-and-drop).
// Dropping on the upper third of a card places before it, on the lower third after it, in the middle makes a tie.

let drag = null;
const EDGE = 80;
const SLACK = 5; // pixels: a click or tap moves less than this and does not drag

function dropTarget(y) {
  if (Math.abs(y + window.scrollY - drag.startY) < SLACK) return null;
  for (const item of element.querySelectorAll('.rb-list .rb-item')) {
    if (item === drag.item) continue;
    const box = item.querySelector('.rb-card').getBoundingClientRect();
    const share = (y - box.top) / box.height;
    if (share < 1 / 3) return { item, kind: 'before' };
    if (share <= 2 / 3) return { item, kind: 'tie' };
    if (share <= 1) return { item, kind: 'after' };
  }
  const others = [...element.querySelectorAll('.rb-list .rb-item')].filter(item => item !== drag.item);
  return others.length ? { item: others[others.length - 1], kind: 'after' } : null;
}

function paintTarget(target) {
  for (const item of element.querySelectorAll('.rb-item')) {
    for (const kind of ['before', 'tie', 'after']) {
      item.classList.toggle(`drop-${kind}`, Boolean(target) && item === target.item && kind === target.kind);
    }
  }
}

function followPointer() {
  if (!drag) return;
  if (drag.target && drag.y < EDGE) window.scrollBy(0, -12);
  else if (drag.target && drag.y > window.innerHeight - EDGE) window.scrollBy(0, 12);
  drag.item.style.transform = `translateY(${drag.y + window.scrollY - drag.startY}px)`;
  drag.target = dropTarget(drag.y);
  paintTarget(drag.target);
  requestAnimationFrame(followPointer);
}

function startDrag(event) {
  const grip = event.target.closest('.rb-grip');
  if (!grip || event.button || drag) return;
  const item = grip.closest('.rb-item');
  drag = { item, startY: event.clientY + window.scrollY, y: event.clientY, target: null };
  grip.setPointerCapture(event.pointerId);
  item.classList.add('dragging');
  event.preventDefault();
  requestAnimationFrame(followPointer);
}

function endDrag(event, drop) {
  if (!drag) return;
  drag.y = event.clientY;
  const { item } = drag;
  const target = event.type === 'pointercancel' ? null : dropTarget(drag.y);
  paintTarget(null);
  item.classList.remove('dragging');
  item.style.transform = '';
  drag = null;
  if (target) drop(Number(item.dataset.card), Number(target.item.dataset.card), target.kind);
}
