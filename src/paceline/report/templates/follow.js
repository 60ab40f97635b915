"use strict";
// Replaces <main> when the run directory has changed. Folds, axes, sorted columns, scroll positions and focus stay.
(() => {
  const POLL_MS = 2000;
  const line = document.getElementById("live");
  let version = line.dataset.version;

  const say = (text) => {
    if (line.textContent !== text) line.textContent = text;
  };

  // The same part of two versions of a page: its section, its kind, its text without numbers, and which of these it is.
  const keyed = (root, selector, name) => {
    const found = new Map();
    for (const each of root.querySelectorAll(selector)) {
      const stem = `${each.closest("[id]")?.id}/${name(each)}`;
      let key = stem;
      for (let number = 2; found.has(key); number += 1) key = `${stem}/${number}`;
      found.set(key, each);
    }
    return found;
  };
  const textOf = (each) => (each.querySelector("summary, figcaption") ?? each).textContent.replace(/[\d,.]+/g, "");
  const folds = (root) => keyed(root, "details", textOf);
  const scrollers = (root) => keyed(root, ".scroll, pre", (each) => each.className);
  const targets = (root) => keyed(root, "a, summary, button, figure", textOf);
  const axes = (root) => keyed(root, ".switch button", textOf);
  const columns = (root) => keyed(root, "thead th", textOf);

  const replace = (next) => {
    const old = document.querySelector("main");
    const isOpen = new Map([...folds(old)].map(([key, each]) => [key, each.open]));
    const scrolled = [...scrollers(old)].filter(([, each]) => each.scrollLeft || each.scrollTop);
    const positions = scrolled.map(([key, each]) => [key, each.scrollLeft, each.scrollTop]);
    const focused = [...targets(old)].find(([, each]) => each === document.activeElement)?.[0];
    const chosen = [...axes(old)].filter(([, each]) => each.getAttribute("aria-pressed") === "true");
    const sorted = [...columns(old)].filter(([, each]) => each.hasAttribute("aria-sort"));
    const sections = [...old.querySelectorAll("section[id]")];
    const seen = sections.findLast((each) => each.getBoundingClientRect().top <= 1);
    const top = seen?.getBoundingClientRect().top;

    const main = document.adoptNode(next.querySelector("main"));
    for (const [key, each] of folds(main)) each.open = isOpen.get(key) ?? each.open;
    old.replaceWith(main);
    document.title = next.title;
    document.dispatchEvent(new Event("pagereplaced"));

    for (const [key] of chosen) axes(main).get(key)?.click();
    for (const [key, before] of sorted) {
      const heading = columns(main).get(key);
      const order = before.getAttribute("aria-sort");
      for (let clicks = 0; clicks < 2 && heading?.getAttribute("aria-sort") !== order; clicks += 1) {
        heading?.querySelector("button")?.click();
      }
    }
    const boxes = scrollers(main);
    for (const [key, left, up] of positions) boxes.get(key)?.scrollTo({ left, top: up, behavior: "instant" });
    targets(main).get(focused)?.focus({ preventScroll: true });
    const now = seen && document.getElementById(seen.id)?.getBoundingClientRect().top;
    if (now !== undefined) window.scrollBy({ top: now - top, behavior: "instant" });
  };

  const poll = async () => {
    try {
      const told = await (await fetch("version", { cache: "no-store" })).json();
      // A selection would be lost: wait until the reader has copied it.
      if (told.version !== version && getSelection().isCollapsed) {
        const text = await (await fetch("/", { cache: "no-store" })).text();
        const next = new DOMParser().parseFromString(text, "text/html");
        version = next.getElementById("live").dataset.version;
        replace(next);
        line.dataset.at = new Date().toLocaleTimeString();
      }
      say(line.dataset.at ? `${told.state} Updated at ${line.dataset.at}.` : told.state);
    } catch {
      say("Not connected: paceline report --follow has ended, or the tunnel to it is closed.");
    }
  };

  const pollAgain = async () => {
    if (!document.hidden) await poll();
    setTimeout(pollAgain, POLL_MS);
  };
  document.addEventListener("visibilitychange", () => document.hidden || poll());
  say(line.dataset.state);
  pollAgain();
})();
