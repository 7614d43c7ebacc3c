"use strict";
// Orders and filters the rows of each trace. Without scripting the page shows everything, as it ran.
const order = document.getElementById("order");
const boxes = [...document.querySelectorAll("[data-only]")];
const keys = {
  time: (row) => Number(row.dataset.order),
  slow: (row) => -Number(row.dataset.ms),
  // A call that drafted nothing has no acceptance: it stands after those that have.
  acceptance: (row) => (row.dataset.acceptance === "" ? 2 : Number(row.dataset.acceptance)),
  itl: (row) => -Number(row.dataset.itl || 0),
};

function show() {
  const asked = boxes.filter((box) => box.checked).map((box) => box.dataset.only);
  const flat = order.value !== "time" || asked.length > 0;
  for (const rows of document.querySelectorAll(".rows")) {
    rows.classList.toggle("flat", flat);
    const all = [...rows.querySelectorAll(".row")];
    all.sort((a, b) => keys[order.value](a) - keys[order.value](b) || keys.time(a) - keys.time(b));
    for (const row of all) {
      const wanted = asked.length ? asked.some((only) => row.dataset[only] === "1") : true;
      row.hidden = !wanted || (order.value !== "time" && row.dataset.kind !== "call");
      rows.append(row);
    }
  }
}

order.addEventListener("change", show);
boxes.forEach((box) => box.addEventListener("change", show));
// The page's address may ask for an order or filters: run.html#slow, run.html#below,nodraft
for (const word of decodeURIComponent(location.hash.slice(1)).split(",")) {
  if (word in keys) order.value = word;
  boxes.filter((box) => box.dataset.only === word).forEach((box) => (box.checked = true));
}
show();
