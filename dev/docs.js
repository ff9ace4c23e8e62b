// The search of the pages that dev/docs.py makes. The index, search.js, is loaded when the field is first used; it is a script and
// no JSON, as a page that was opened as a file may not fetch.
"use strict";
(() => {
  const top = document.currentScript.dataset.top;
  const most = 30;
  let entries = null;

  window.shoalSearch = (found) => {
    entries = found.map(([place, name, where, text]) =>
      ({place, name, where, text, low: text.toLowerCase(), lowName: name.toLowerCase()}));
  };

  // A name that is what was asked comes first, then names that begin with it, names that have it, texts.
  function rank(entry, words) {
    let sum = 0;
    for (const word of words) {
      if (entry.lowName === word) sum += 100;
      else if (entry.lowName.startsWith(word)) sum += 40;
      else if (entry.lowName.includes(word)) sum += 20;
      else if (entry.low.includes(word)) sum += 1;
      else return 0;
    }
    return sum;
  }

  function find(asked) {
    const words = asked.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    return entries.map((entry) => ({entry, rank: rank(entry, words), word: words[0]})).filter((hit) => hit.rank)
      .sort((a, b) => b.rank - a.rank).slice(0, most);
  }

  function snippet(entry, word) {
    const at = Math.max(0, entry.low.indexOf(word) - 40);
    return (at ? "... " : "") + entry.text.slice(at, at + 140);
  }

  function item(hit) {
    const row = document.createElement("li"), link = document.createElement("a");
    const place = document.createElement("small"), text = document.createElement("small");
    link.href = top + hit.entry.place;
    link.textContent = hit.entry.name;
    place.textContent = hit.entry.where ? " " + hit.entry.where : "";
    text.textContent = snippet(hit.entry, hit.word);
    link.append(place);
    row.append(link, text);
    return row;
  }

  function begin() {
    const field = document.querySelector("header input"), list = document.querySelector("header ol");
    function show() {
      if (!entries) return;
      const hits = find(field.value);
      list.replaceChildren(...hits.map(item));
      if (!hits.length && field.value.trim()) list.textContent = "Nothing has all of these words.";
      list.hidden = !field.value.trim();
    }
    function load() {
      if (document.getElementById("search-index")) return;
      const script = document.createElement("script");
      script.id = "search-index";
      script.src = top + "search.js";
      script.onload = show;
      document.head.append(script);
    }
    field.addEventListener("focus", load);
    field.addEventListener("input", () => { load(); show(); });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && list.querySelector("a")) list.querySelector("a").click();
      if (event.key === "Escape") { field.value = ""; show(); }
    });
    list.addEventListener("click", () => { field.value = ""; show(); });
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); field.focus(); }
    });
    const asked = new URLSearchParams(location.search).get("q");
    if (asked) { field.value = asked; load(); }
  }

  begin();
})();
