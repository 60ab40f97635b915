// What the theme leaves out for readers without a mouse: code and tables that scroll sideways take the focus, so that
// the arrow keys scroll them, and the search has a name.
(() => {
  const mark = () => {
    for (const each of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
      if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
      else each.removeAttribute("tabindex");
    }
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  };
  addEventListener("load", () => setTimeout(mark));
  addEventListener("resize", mark);
})();
