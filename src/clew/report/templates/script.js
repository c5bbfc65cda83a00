"use strict";
// Curves: the readout of the step nearest to the pointer; arrow keys walk along a focused curve.
for (const figure of document.querySelectorAll("figure[data-points]")) {
  const points = JSON.parse(figure.dataset.points);
  const output = figure.querySelector("output");
  const rest = output.textContent;
  for (const svg of figure.querySelectorAll("svg")) {
    const [x0, x1, first, last] = ["x0", "x1", "first", "last"].map((key) => Number(svg.dataset[key]));
    const cursor = svg.querySelector(".cursor");
    let at = points.length - 1;
    const show = (index) => {
      at = Math.max(0, Math.min(points.length - 1, index));
      const [step, text] = points[at];
      const x = x0 + ((step - first) / (last - first)) * (x1 - x0);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", "visible");
      output.textContent = text;
    };
    const hide = () => {
      cursor.setAttribute("visibility", "hidden");
      output.textContent = rest;
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const step = first + ((x - x0) / (x1 - x0)) * (last - first);
      let nearest = 0;
      points.forEach(([s], i) => {
        if (Math.abs(s - step) < Math.abs(points[nearest][0] - step)) nearest = i;
      });
      show(nearest);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) show(at); });
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) {
        event.preventDefault();
        show(at + move);
      }
    });
  }
}
// Tokens: a tap shows what hovering shows.
const tip = document.getElementById("tip");
document.addEventListener("click", (event) => {
  const token = event.target.closest(".tokens b");
  tip.hidden = !token;
  if (token) tip.textContent = `${token.textContent.trim() || "space"}: ${token.title}`;
});
