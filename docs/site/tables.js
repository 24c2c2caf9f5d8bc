// Sorts a table that has a column of numbers when a header is clicked: numbers by value, all else as
// text. Cells without a value ("-") come last in both directions.
const NUMBER = /^[-+]?[\d,]*\.?\d+(?= |$|x)/;
const text = (row, column) => row.cells[column]?.textContent.trim() ?? "-";
const number = (row, column) => parseFloat(NUMBER.exec(text(row, column))?.[0].replaceAll(",", ""));
const filled = (rows, column) => rows.filter((row) => text(row, column) !== "-");
const numeric = (rows, column) => filled(rows, column).every((row) => !Number.isNaN(number(row, column)));

document$.subscribe(() => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const rows = [...table.tBodies[0]?.rows ?? []];
    const headers = [...table.tHead.rows[0].cells];
    if (rows.length < 3 || !headers.some((_, column) => column && numeric(rows, column))) continue;
    for (const [column, header] of headers.entries()) {
      if (!header.textContent.trim()) continue;
      const button = Object.assign(document.createElement("button"), { className: "sort" });
      button.append(...header.childNodes);
      header.append(button);
      button.onclick = () => sort(table, rows, column, header);
    }
  }
});

function sort(table, rows, column, header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const sorted = filled(rows, column).sort(numeric(rows, column)
    ? (one, other) => number(one, column) - number(other, column)
    : (one, other) => text(one, column).localeCompare(text(other, column), "en", { numeric: true }));
  if (descending) sorted.reverse();
  table.tBodies[0].append(...sorted, ...rows.filter((row) => text(row, column) === "-"));
}
