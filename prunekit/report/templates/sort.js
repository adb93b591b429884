"use strict";
// Tables of the class "sortable" get a button in every heading: ascending, descending, as written. The page works without it.
const SCALES = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
const NUMBER = /^\[?([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?![\w.])\s?(?:([kMGT])B?(?!\w))?/;
const ORDERS = [null, "ascending", "descending"];

// What a cell is sorted by: a number with its decimal prefix ("64 → 21.3 M" counts as the last), text, or null.
function keyOf(cell) {
  const text = (cell ? cell.textContent : "").split("→").pop().trim().replace(/−/g, "-").replace(/,(?=\d{3})/g, "");
  if (text === "" || text === "–") return null;
  const found = NUMBER.exec(text);
  return found ? Number(found[1]) * (SCALES[found[2]] || 1) : text;
}

function compare(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null);
  if (typeof one === "number" && typeof other === "number") return sign * (one - other);
  return sign * String(one).localeCompare(String(other), undefined, { numeric: true });
}

function sort(table, written, column, order) {
  const rows = written.map((row) => [keyOf(row.cells[column]), row]);
  if (order) rows.sort((one, other) => compare(one[0], other[0], order === "ascending" ? 1 : -1));
  table.tBodies[0].append(...rows.map((row) => row[1]));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const written = [...table.tBodies[0].rows];
  const headings = [...table.tHead.rows[0].cells];
  if (written.length < 2) continue;
  headings.forEach((heading, column) => {
    if (heading.textContent.trim() === "") return;
    const button = document.createElement("button");
    const method = heading.querySelector("abbr");
    button.type = "button";
    if (method) button.title = method.title;
    button.append(...(method || heading).childNodes);
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const order = ORDERS[(ORDERS.indexOf(heading.getAttribute("aria-sort")) + 1) % ORDERS.length];
      for (const other of headings) other.removeAttribute("aria-sort");
      if (order) heading.setAttribute("aria-sort", order);
      sort(table, written, column, order);
    });
  });
}
