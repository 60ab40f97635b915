// What the theme leaves out for readers without a mouse: code and tables that scroll sideways take the focus, so that
// the arrow keys scroll them, and the search and each part of the navigation have a name of their own.
(() => {
  const mark = () => {
    for (const each of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
      if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
      else each.removeAttribute("tabindex");
    }
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
    // A section with a page of its own is labelled by an arrow, which has no text.
    for (const each of document.querySelectorAll("nav[aria-labelledby]")) {
      if (document.getElementById(each.getAttribute("aria-labelledby"))?.textContent.trim()) continue;
      each.setAttribute("aria-label", each.parentElement.querySelector(".md-nav__link").textContent.trim());
      each.removeAttribute("aria-labelledby");
    }
    // The buttons of a block of code are no navigation.
    for (const each of document.querySelectorAll(".md-code__nav")) each.setAttribute("role", "none");
  };
  addEventListener("load", () => {
    setTimeout(mark);
    // The theme adds the buttons when the code comes into view.
    new MutationObserver(mark).observe(document.querySelector("main"), { childList: true, subtree: true });
  });
  addEventListener("resize", mark);
})();
