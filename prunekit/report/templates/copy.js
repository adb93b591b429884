// Commands get a button that copies them. Without this script a click selects them.
for (const command of document.querySelectorAll("pre.command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(command);
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  const box = document.createElement("div");
  box.className = "copyable";
  command.replaceWith(box);
  box.append(command, button);
}
