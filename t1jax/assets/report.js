// The arrow keys walk along the tokens of an episode. All else works without.
document.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const group = step && event.target.closest(".tokens");
  if (!group) return;
  const tokens = [...group.querySelectorAll(".t")];
  const next = tokens[tokens.indexOf(event.target) + step];
  if (next) {
    event.preventDefault();
    next.focus();
  }
});
