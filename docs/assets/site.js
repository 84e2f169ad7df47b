/* What is wider than its place scrolls; so it can be reached and scrolled by the keyboard, too. */
"use strict";

(() => {
  const BOXES = {
    ".md-typeset__scrollwrap": {tabindex: "0", role: "group", "aria-label": "Table, scrolls sideways"},
    "pre > code": {tabindex: "0"}, // the theme does it only when the code has been on the screen
  };
  function reach() {
    for (const [boxes, attributes] of Object.entries(BOXES)) {
      for (const box of document.querySelectorAll(boxes)) {
        const scrolls = box.scrollWidth > box.clientWidth;
        for (const [name, value] of Object.entries(attributes)) {
          if (scrolls) box.setAttribute(name, value);
          else box.removeAttribute(name);
        }
      }
    }
  }
  addEventListener("load", reach);
  addEventListener("resize", reach);
})();
