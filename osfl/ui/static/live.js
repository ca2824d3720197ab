// Replace the sections of a page that its event stream sends.
"use strict";

const address = document.body.dataset.events;

// Keep what the reader has opened, and elements that stay the same, such as loaded images.
function replaceSection(target, html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  for (const fresh of template.content.querySelectorAll("[id]")) {
    const current = document.getElementById(fresh.id);
    if (!current || !target.contains(current)) continue;
    if (fresh.tagName === "DETAILS") fresh.open = current.open;
    else if (current.isEqualNode(fresh)) fresh.replaceWith(current);
  }
  const focus = target.contains(document.activeElement) ? document.activeElement.id : "";
  const scrolls = [...target.querySelectorAll(".wide")].map((box) => [box.scrollLeft, box.scrollTop]);
  target.replaceChildren(template.content);
  target.querySelectorAll(".wide").forEach((box, number) => {
    if (scrolls[number]) [box.scrollLeft, box.scrollTop] = scrolls[number];
  });
  if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
}

if (address) {
  const source = new EventSource(address);
  const lost = document.getElementById("lost");
  source.addEventListener("section", (message) => {
    const { id, html } = JSON.parse(message.data);
    const target = document.getElementById(id);
    if (target) replaceSection(target, html);
  });
  source.addEventListener("end", () => source.close());
  source.addEventListener("open", () => { lost.hidden = true; });
  source.addEventListener("error", () => { lost.hidden = false; });
}
