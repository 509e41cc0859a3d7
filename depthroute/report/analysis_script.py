"""The script of the token view. It fetches nothing, and puts every text into the page as text."""

from __future__ import annotations

SCRIPT = r"""
(() => {
  "use strict";
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("token-reads").textContent);
  const [siteChoice, roleChoice, legend, text, bars] = ["site", "role", "legend", "tokens", "weights"].map((name) => find("reads-" + name));
  const make = (tag, words, css) => {
    const node = document.createElement(tag);
    if (words !== undefined) node.textContent = words;
    if (css) node.className = css;
    return node;
  };
  const options = (choice, names, wanted) => {
    choice.replaceChildren(...names.map((name) => {
      const option = make("option", name);
      option.value = name;
      return option;
    }));
    choice.value = names.includes(wanted) ? wanted : names[names.length - 1];
    choice.disabled = names.length < 2;
  };
  const control = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
  const visible = (token) => token === "" ? "\u2205" : token.replace(/\t/g, "\u21e5").replace(control, "\ufffd");
  const share = (thousandths) => (thousandths / 1000).toFixed(3).replace("-", "\u2212");
  let read, chosen = 0, only = null, top = [];

  const tokens = data.tokens.map((token, index) => {
    const node = make("span", undefined, "token");
    token.split("\n").forEach((line, part) => {
      if (part) node.append("\u21b5\n");
      if (line || token === "") node.append(visible(line));
    });
    node.setAttribute("role", "option");
    node.tabIndex = -1;
    node.dataset.index = index;
    return node;
  });
  text.replaceChildren(...tokens);

  const show = (index) => {
    const rows = read.sources.map((source, place) => {
      const weight = read.weights[place][index];
      const row = make("div", undefined, place === top[index] ? "bar most" : "bar");
      const track = make("span", undefined, "track"), fill = make("span", undefined, "fill");
      fill.style.width = Math.max(0, Math.min(100, weight / 10)) + "%";
      fill.style.background = data.colors[source];
      track.append(fill);
      row.append(make("span", data.names[source], "source"), track, make("span", share(weight), "share"));
      return row;
    });
    const title = make("p", undefined, "of");
    const words = visible(data.tokens[index]).replace(/\n/g, "\u21b5");
    title.append("Token " + (index + 1) + " of " + tokens.length + ": ", make("code", words));
    bars.replaceChildren(title, ...rows);
  };

  const choose = (index, focus) => {
    tokens[chosen].tabIndex = -1;
    tokens[chosen].setAttribute("aria-selected", "false");
    chosen = Math.max(0, Math.min(tokens.length - 1, index));
    tokens[chosen].tabIndex = 0;
    tokens[chosen].setAttribute("aria-selected", "true");
    if (focus) tokens[chosen].focus();
    show(chosen);
  };

  const filter = (source) => {
    only = source;
    tokens.forEach((node, index) => node.classList.toggle("aside", only !== null && read.sources[top[index]] !== only));
    [...legend.children].forEach((node) => node.setAttribute("aria-pressed", String(Number(node.dataset.source) === only)));
  };

  const paint = () => {
    read = data.reads.find((one) => one.site === siteChoice.value && one.role === roleChoice.value);
    top = tokens.map((_, index) => read.weights.reduce((best, row, place) => row[index] > read.weights[best][index] ? place : best, 0));
    const counts = new Map();
    tokens.forEach((node, index) => {
      const place = top[index], source = read.sources[place];
      counts.set(source, (counts.get(source) || 0) + 1);
      node.style.setProperty("--source", data.colors[source]);
      const words = visible(data.tokens[index]).trim() || "white space";
      node.setAttribute("aria-label", words + ", reads " + data.names[source] + " most, " + share(read.weights[place][index]));
    });
    legend.replaceChildren(...[...counts.keys()].sort((a, b) => a - b).map((source) => {
      const entry = make("button"), swatch = make("span", undefined, "swatch");
      entry.type = "button";
      entry.dataset.source = source;
      swatch.style.background = data.colors[source];
      entry.append(swatch, data.names[source] + " ", make("span", counts.get(source) + " of " + tokens.length, "count"));
      entry.addEventListener("click", () => filter(only === source ? null : source));
      return entry;
    }));
    filter(counts.has(only) ? only : null);
    choose(chosen, false);
  };

  const line = (down) => {
    const here = tokens[chosen].getClientRects()[0], middle = (here.left + here.right) / 2;
    let best = chosen, least = Infinity;
    tokens.forEach((node, index) => {
      for (const box of node.getClientRects()) {
        const apart = down ? box.top - here.top : here.top - box.top;
        if (apart < here.height / 2) continue;
        const distance = 1000 * apart + Math.abs((box.left + box.right) / 2 - middle);
        if (distance < least) [best, least] = [index, distance];
      }
    });
    return best;
  };
  const moves = {
    ArrowRight: () => chosen + 1, ArrowLeft: () => chosen - 1, ArrowDown: () => line(true), ArrowUp: () => line(false),
    Home: () => 0, End: () => tokens.length - 1,
  };
  const at = (event) => event.target.closest(".token");
  text.addEventListener("keydown", (event) => {
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(moves[event.key](), true);
  });
  text.addEventListener("click", (event) => { if (at(event)) choose(Number(at(event).dataset.index), true); });
  text.addEventListener("focusin", (event) => { if (at(event)) choose(Number(at(event).dataset.index), false); });
  text.addEventListener("mouseover", (event) => { if (at(event)) show(Number(at(event).dataset.index)); });
  text.addEventListener("mouseleave", () => show(chosen));

  const roles = () => data.reads.filter((one) => one.site === siteChoice.value).map((one) => one.role);
  siteChoice.addEventListener("change", () => { options(roleChoice, roles(), roleChoice.value); paint(); });
  roleChoice.addEventListener("change", paint);
  options(siteChoice, [...new Set(data.reads.map((one) => one.site))]);
  options(roleChoice, roles());
  paint();
})();
"""
