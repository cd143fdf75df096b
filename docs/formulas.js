// Draws the formulas of a page by KaTeX, which docs/pages.py puts before this script.
for (const place of document.querySelectorAll(".arithmatex")) {
  const isBlock = place.tagName === "DIV", formula = place.textContent.trim().replace(/^\\[[(]|\\[\])]$/g, "");
  katex.render(formula, place, { displayMode: isBlock, throwOnError: true });
}
