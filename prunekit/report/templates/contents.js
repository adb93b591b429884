// The contents list is unfolded where there is room beside the page. The page works without this script.
const contents = document.querySelector(".contents details");
if (contents) {
  const roomy = matchMedia("(min-width: 75rem)");
  const fit = () => { contents.open = roomy.matches; };
  roomy.addEventListener("change", fit);
  contents.addEventListener("click", (event) => { if (event.target.closest("a")) fit(); });
  fit();
}
