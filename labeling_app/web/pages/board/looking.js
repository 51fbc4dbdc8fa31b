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
  if (task || busy) return;
  if (screen.ok) show(screen);
  else lookAgain();
}
