// Concatenated in the order of SCRIPTS in web/app.py; all top-level names are shared.
//
// Nothing is left: the board asks again now and then, for an import or a new round may bring tasks.

const LOOK_AGAIN_MS = 10000;
let looking = 0;

function lookAgain() {
  clearTimeout(looking);
  if (!task) looking = setTimeout(lookForWork, LOOK_AGAIN_MS);
}

async function lookForWork() {
  if (!element.isConnected || task) return;
  const screen = document.hidden || busy || find('dialog[open]') ? { ok: false } : await ask({ op: 'next' });
  if (task) return;
  if (busy || !screen.ok) {
    if (screen.error === SIGNED_OUT) complain(screen.error);
    lookAgain();
    return;
  }
  show(screen);
  if (task) startClockWithPerson();
}

// The task came while nobody may have been there: its time begins with the first movement or key.
function startClockWithPerson() {
  const spent = performance.now() - shownAt;
  const kinds = ['pointermove', 'pointerdown', 'keydown'];
  const start = () => {
    for (const kind of kinds) document.removeEventListener(kind, start, true);
    shownAt = performance.now() - spent;
  };
  for (const kind of kinds) document.addEventListener(kind, start, true);
}
