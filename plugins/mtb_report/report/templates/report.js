"use strict";
// Sorting: what is unknown has no data-sort and stays at the end, whichever way; rows that are equal keep their order.
const compare = (a, b) => {
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
};
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const body = head.closest("table").tBodies[0];
    const falling = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = (row) => row.cells[head.cellIndex].dataset.sort;
    const rows = [...body.rows];
    const known = rows.filter((row) => key(row) !== undefined);
    known.sort((a, b) => compare(key(a), key(b)) * (falling ? -1 : 1));
    body.append(...known, ...rows.filter((row) => key(row) === undefined));
  });
}
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const parts = button.closest("figure").querySelectorAll(`svg [data-series="${button.dataset.of}"]`);
    for (const part of parts) part.classList.toggle("off", !shown);
  });
}
const contents = document.querySelector("nav details");
if (contents && matchMedia("(max-width: 69.99rem)").matches) contents.open = false;
