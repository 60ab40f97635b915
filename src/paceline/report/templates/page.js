"use strict";
// Adds a cursor that all charts over the same axis share, a switch of that axis, copy buttons and sortable tables. The
// page is complete without it.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 440;

  const draw = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return parent.appendChild(element);
  };
  const button = (text, title, onClick) => {
    const element = document.createElement("button");
    Object.assign(element, { type: "button", textContent: text, title, onclick: onClick });
    return element;
  };
  const format = (value) => (value === 0 ? "0" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));

  // Returns the value at x of a line through sorted points, continued beyond both ends.
  const interpolate = (points, x) => {
    let after = points.findIndex((point) => point[0] >= x);
    if (after < 0) after = points.length - 1;
    after = Math.max(1, after);
    const [[x0, y0], [x1, y1]] = [points[after - 1], points[after]];
    return x1 === x0 ? y1 : y0 + ((x - x0) / (x1 - x0)) * (y1 - y0);
  };

  class Plot {
    constructor(svg) {
      this.svg = svg;
      this.data = JSON.parse(svg.dataset.plot);
      this.label = svg.querySelector(".x-label");
      this.own = { unit: this.label.textContent, ticks: [...svg.querySelectorAll(".x-tick")] };
      this.readout = svg.closest("figure").querySelector(".readout");
      this.cursor = draw("path", { class: "cursor", visibility: "hidden" }, svg);
      for (const hint of svg.querySelectorAll(".hint")) hint.remove();
    }

    // Positions are in pixels of the chart; values of x are those of its own unit.
    position(x) {
      const { left, right, x: [low, high], logX } = this.data;
      const scale = logX ? Math.log : (value) => value;
      const mapped = this.knots ? (value) => interpolate(this.knots, value) : scale;
      return left + ((mapped(x) - mapped(low)) / (mapped(high) - mapped(low))) * (right - left);
    }

    nearest(at) {
      const xs = this.data.lines.flatMap((line) => line.points.map((point) => point[0]));
      return xs.reduce((best, x) => (Math.abs(this.position(x) - at) < Math.abs(this.position(best) - at) ? x : best));
    }

    show(x) {
      const { top, bottom, left, right, lines } = this.data;
      const at = this.position(x);
      const isInside = at >= left - 1 && at <= right + 1;
      this.cursor.setAttribute("visibility", isInside ? "visible" : "hidden");
      this.cursor.setAttribute("d", `M${at} ${top}V${bottom}`);
      const values = lines.map(({ name, points }) => {
        const [, y] = points.reduce((best, each) => (Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best));
        return lines.length > 1 ? `${name} ${format(y)}` : format(y);
      });
      const shown = this.knots ? interpolate(this.knots, x) : x;
      this.readout.textContent = isInside ? `${this.label.textContent} ${format(shown)}: ${values.slice(0, 4).join(", ")}` : "";
    }

    hide() {
      this.cursor.setAttribute("visibility", "hidden");
      this.readout.textContent = "";
    }

    // Moves everything drawn to another unit of x; "" is the chart's own.
    setUnit(unit) {
      const drawn = [...this.svg.querySelectorAll("polyline")].map((each) => ["points", each]);
      drawn.push(...[...this.svg.querySelectorAll("circle")].map((each) => ["cx", each]));
      for (const [attribute, element] of drawn) {
        element.original ??= element.getAttribute(attribute);
        element.setAttribute(attribute, element.original);
      }
      this.knots = null;
      for (const tick of this.svg.querySelectorAll(".x-tick")) tick.remove();
      this.label.textContent = unit || this.own.unit;
      if (!unit) return this.svg.append(...this.own.ticks);
      const { left, right, bottom, x: [low, high], units } = this.data;
      const valueAt = (at) => low + ((at - left) / (right - left)) * (high - low);
      this.knots = units[unit];
      const moved = (at) => this.position(valueAt(Number(at))).toFixed(1);
      for (const [attribute, element] of drawn) {
        const text = element.original.replace(/([\d.-]+),/g, (_, at) => `${moved(at)},`);
        element.setAttribute(attribute, attribute === "cx" ? moved(element.original) : text);
      }
      const [first, last] = [low, high].map((x) => interpolate(this.knots, x));
      const rough = (last - first) / 5;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
      for (let value = Math.ceil(first / step) * step; value <= last + step / 1e6; value += step) {
        const at = left + ((value - first) / (last - first)) * (right - left);
        draw("path", { class: "axis x-tick", d: `M${at} ${bottom}v4` }, this.svg);
        const attributes = { class: "tick x-tick", x: at, y: bottom + 17, "text-anchor": "middle" };
        draw("text", attributes, this.svg).textContent = format(value);
      }
    }
  }

  const shareCursor = (plots) => {
    for (const plot of plots) {
      const figure = plot.svg.closest("figure");
      const showAll = (x) => plots.forEach((each) => each.show(x));
      const hideAll = () => plots.forEach((each) => each.hide());
      const follow = (event) => {
        const box = plot.svg.getBoundingClientRect();
        showAll((figure.at = plot.nearest(((event.clientX - box.left) / box.width) * WIDTH)));
      };
      plot.svg.addEventListener("pointermove", follow);
      plot.svg.addEventListener("pointerdown", follow);
      plot.svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hideAll());
      figure.tabIndex = 0;
      figure.addEventListener("blur", hideAll);
      figure.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!by) return;
        event.preventDefault();
        const xs = [...new Set(plot.data.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
        const now = xs.indexOf(figure.at ?? (by > 0 ? -Infinity : Infinity));
        const next = now < 0 ? (by > 0 ? 0 : xs.length - 1) : Math.min(xs.length - 1, Math.max(0, now + by));
        showAll((figure.at = xs[next]));
      });
    }
  };

  const addUnitSwitch = (row, plots) => {
    const [own, ...others] = [plots[0].own.unit, ...Object.keys(plots[0].data.units)];
    const group = document.createElement("div");
    group.className = "switch";
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", "Horizontal axis");
    const choose = (unit) => {
      for (const plot of plots) plot.setUnit(unit === own ? "" : unit);
      for (const each of group.children) each.setAttribute("aria-pressed", each.textContent === unit);
    };
    for (const unit of [own, ...others]) group.append(button(unit, `Draw over ${unit}`, () => choose(unit)));
    row.before(group);
    choose(own);
  };

  const sortable = (table) => {
    const body = table.tBodies[0];
    const valueOf = (cell) => cell.querySelector("data")?.value ?? cell.textContent;
    table.querySelectorAll("thead th").forEach((heading, column) => {
      const sort = () => {
        const isUp = heading.getAttribute("aria-sort") !== "ascending";
        const compare = (a, b) => {
          const [x, y] = [a, b].map((row) => valueOf(row.cells[column]));
          const by = x !== "" && y !== "" && isFinite(x) && isFinite(y) ? x - y : String(x).localeCompare(y);
          return isUp ? by : -by;
        };
        for (const each of heading.parentElement.cells) each.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        body.append(...[...body.rows].sort(compare));
      };
      const control = button(heading.textContent, "Sort by this column", sort);
      heading.replaceChildren(control);
    });
  };

  const enhance = () => {
    const main = document.querySelector("main");
    const groups = new Map();
    for (const svg of main.querySelectorAll("svg[data-plot]")) {
      const plot = new Plot(svg);
      groups.set(plot.own.unit, [...(groups.get(plot.own.unit) ?? []), plot]);
    }
    for (const plots of groups.values()) {
      shareCursor(plots);
      const switched = plots.filter((plot) => plot.data.units);
      if (switched.length) addUnitSwitch(switched[0].svg.closest(".charts"), switched);
    }
    for (const command of main.querySelectorAll("pre.command")) {
      const copy = button("Copy", "Copy this command", async () => {
        await navigator.clipboard.writeText(command.textContent.trim());
        copy.textContent = "Copied";
      });
      const frame = document.createElement("div");
      frame.className = "copied";
      command.replaceWith(frame);
      frame.append(command, copy);
    }
    main.querySelectorAll("table:not(.sum)").forEach((table) => table.tBodies[0].rows.length > 2 && sortable(table));
  };

  enhance();
  document.addEventListener("pagereplaced", enhance);
})();
