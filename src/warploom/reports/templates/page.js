// Selecting a line of one side marks and shows all that belongs to it on the other. Without scripts
// the numbers are plain links both ways.
(() => {
  const source = document.getElementById("source"), sass = document.getElementById("sass");
  if (!source || !sass) return;
  const ofLine = new Map();
  for (const row of sass.querySelectorAll(".row")) {
    if (!ofLine.has(row.dataset.l)) ofLine.set(row.dataset.l, []);
    ofLine.get(row.dataset.l).push(row);
  }
  let marked = [];
  const show = (pane, row) => {
    const top = row.getBoundingClientRect().top - pane.getBoundingClientRect().top;
    if (top < 30 || top > pane.clientHeight - 30) pane.scrollTop += top - pane.clientHeight / 3;
  };
  const select = (line, clicked) => {
    for (const row of marked) row.classList.remove("hit", "at");
    const left = document.getElementById("L" + line), right = ofLine.get(line) || [];
    marked = [left, ...right].filter(Boolean);
    for (const row of marked) row.classList.add("hit");
    clicked.classList.add("at");
    if (clicked !== left && left) show(source, left);
    if (clicked === left && right.length) show(sass, right[0]);
    history.replaceState(null, "", "#" + clicked.id);
  };
  const line = (row) => row.dataset.l || row.id.slice(1);
  for (const pane of [source, sass]) {
    pane.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (!row || !window.getSelection().isCollapsed) return;
      event.preventDefault();
      select(line(row), row);
    });
  }
  const jump = () => {
    const row = document.getElementById(location.hash.slice(1));
    if (!row || !row.classList.contains("row")) return;
    select(line(row), row);
    show(row.closest(".pane"), row);
  };
  window.addEventListener("hashchange", jump);
  jump();
})();
