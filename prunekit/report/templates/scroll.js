// Elements that are wider than the screen fade at the edge where they continue. The page works without this script.
const WIDE = [...document.querySelectorAll(".scroll, figure, pre")];

function mark(element) {
  const beyond = element.scrollWidth - element.clientWidth;
  element.classList.toggle("wide", beyond > 1);
  element.classList.toggle("before", element.scrollLeft > 1);
  element.classList.toggle("after", element.scrollLeft < beyond - 1);
}

const markAll = () => WIDE.forEach(mark);
for (const element of WIDE) element.addEventListener("scroll", () => mark(element), { passive: true });
document.addEventListener("toggle", markAll, true); // what was folded has a width only once it is open
window.addEventListener("resize", markAll);
markAll();
