/* A table that is wider than its place scrolls; so it can be reached and scrolled by the keyboard, too. */
"use strict";

(() => {
  function reach() {
    for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
      const scrolls = box.scrollWidth > box.clientWidth;
      const attributes = {tabindex: "0", role: "group", "aria-label": "Table, scrolls sideways"};
      for (const [name, value] of Object.entries(attributes)) {
        if (scrolls) box.setAttribute(name, value);
        else box.removeAttribute(name);
      }
    }
  }
  addEventListener("load", reach);
  addEventListener("resize", reach);
})();
