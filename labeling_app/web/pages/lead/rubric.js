// The preview: the server renders and sanitizes it, as it does for the board.
let waiting = 0;

async function preview() {
  const text = one('#text').value;
  const said = await post('/lead/rubric/preview', { text });
  if (one('#text').value !== text) return; // a newer one is on its way
  if (said.error) return say(said);
  one('.shown').innerHTML = said.html;
}

one('#text').addEventListener('input', () => {
  clearTimeout(waiting);
  waiting = setTimeout(preview, 300);
});

document.addEventListener('click', event => {
  if (!event.target.matches('[data-act=edit]')) return;
  one('#text').value = event.target.closest('details').querySelector('pre').textContent;
  one('#text').focus();
  preview();
});

preview();
