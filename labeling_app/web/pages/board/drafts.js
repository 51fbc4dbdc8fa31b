// Concatenated in the order of SCRIPTS in web/app.py; all top-level names are shared.
//
// The draft of the task on the screen: kept in this browser at once, and on the server after a pause in the work.

const DRAFT_PAUSE = 800; // milliseconds
let unsaved = null, draftTimer = 0, saving = Promise.resolve();

function keepDraft() {
  askToConfirm(false);
  unsaved = { op: 'draft', ticket: task.ticket, state: draftState() };
  writeStorage(`draft:${task.ticket}`, unsaved.state);
  saved('Saving the draft …');
  clearTimeout(draftTimer);
  draftTimer = setTimeout(saveDraft, DRAFT_PAUSE);
}

function cancelDraft() {
  clearTimeout(draftTimer);
  unsaved = null;
}

// Send what is not sent yet. Resolves when the server has answered, or cannot be reached.
function saveDraft() {
  const draft = unsaved;
  cancelDraft();
  if (draft) {
    saving = ask(draft).then(answer => {
      if (task && task.ticket === draft.ticket) saved(answer.ok ? 'Draft saved' : 'Draft kept in this browser');
    });
  }
  return saving;
}
