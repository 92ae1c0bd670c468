// Turn headings of columns into buttons that sort: ascending first, then descending. Cells of
// numeric columns store their value in data-value. Cells without a value come after cells with one,
// and missing cells come last, in both directions.
"use strict";

const MISSING = ["", "–"];

function rank(cell) {
  if ("value" in cell.dataset) return 0;
  return MISSING.includes(cell.textContent.trim()) ? 2 : 1;
}

function compare(one, other) {
  if (rank(one) === 0) return one.dataset.value - other.dataset.value;
  return one.textContent.localeCompare(other.textContent, "en", { numeric: true });
}

function sortBy(table, column) {
  const headings = [...table.tHead.rows[0].cells];
  const downward = headings[column].getAttribute("aria-sort") === "ascending";
  for (const heading of headings) heading.removeAttribute("aria-sort");
  headings[column].setAttribute("aria-sort", downward ? "descending" : "ascending");
  const order = (a, b) => {
    const [one, other] = [a.cells[column], b.cells[column]];
    return rank(one) - rank(other) || (downward ? -1 : 1) * compare(one, other);
  };
  // a table without rows has no body
  for (const body of table.tBodies) body.append(...[...body.rows].sort(order));
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, column));
    heading.append(button);
  });
}
