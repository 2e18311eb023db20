// The page works without this script. With it, a page follows the database: the server sends an event when what the page
// shows has changed, and the page then reads itself again and takes over its regions.
"use strict";

// The colours that a person has chosen, before anything is shown.
const themes = ["", "light", "dark"];
const stored = () => { try { return localStorage.getItem("onceq-theme") || ""; } catch { return ""; } };
function colour(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
}
colour(stored());

let main, status;
let reading = false, again = false;

// busy says that a person is in the middle of something in a region, which is then left as it is.
function busy(region) {
  if (region.matches("[data-pointed]") || region.querySelector("details[open] form")) return true;
  const at = document.activeElement;
  if (at && region.contains(at) && at.matches("input, textarea, select")) return true;
  for (const input of region.querySelectorAll("input:not([type=hidden]), textarea")) {
    if (input.type === "checkbox" ? input.checked !== input.defaultChecked : input.value !== input.defaultValue) return true;
  }
  const chosen = window.getSelection();
  return Boolean(chosen) && !chosen.isCollapsed && region.contains(chosen.anchorNode);
}

// place says where the focus is in a region, so that it can be there again.
function place(region) {
  const all = [...region.querySelectorAll("a, button, input")];
  return all.indexOf(document.activeElement);
}

async function take() {
  if (reading) { again = true; return; }
  reading = true;
  try {
    const answer = await fetch(location.href.split("#")[0], { headers: { Accept: "text/html" }, cache: "no-store", redirect: "error" });
    if (answer.ok || answer.status === 404) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const regions = [...document.querySelectorAll("[data-region]")];
      const renewed = (region) => fresh.querySelector(`[data-region="${region.dataset.region}"]`);
      if (!regions.every(renewed)) { // what the page is about has gone
        if (regions.some(busy)) setTimeout(take, 1000); else location.reload();
        return;
      }
      for (const region of regions) {
        const other = renewed(region);
        if (busy(region) || region.innerHTML === other.innerHTML) continue;
        const at = place(region);
        const open = [...region.querySelectorAll("details")].map((d) => d.open);
        [...other.querySelectorAll("details")].forEach((d, i) => { d.open = open[i] || d.open; });
        region.replaceChildren(...[...other.childNodes].map((node) => document.adoptNode(node)));
        if (at >= 0) region.querySelectorAll("a, button, input")[at]?.focus({ preventScroll: true });
      }
      const nav = fresh.querySelector("header .bar > nav"), old = document.querySelector("header .bar > nav");
      if (nav && old && nav.innerHTML !== old.innerHTML && !old.contains(document.activeElement)) old.replaceWith(document.adoptNode(nav));
      const shown = fresh.querySelector("footer time"), before = document.querySelector("footer time");
      if (shown && before) before.replaceWith(document.adoptNode(shown));
    }
  } catch {
    // the stream says when the server is gone
  } finally {
    reading = false;
  }
  if (again) { again = false; take(); }
}

let lost = 0;

function follow() {
  const stream = new EventSource(main.dataset.live);
  stream.addEventListener("open", () => { clearTimeout(lost); lost = 0; status.textContent = "Follows the database."; main.dataset.following = "yes"; });
  stream.addEventListener("change", take);
  stream.addEventListener("error", () => {
    // A stream ends every minute and comes back at once. Only one that stays away is worth a word.
    if (!lost) lost = setTimeout(() => { status.textContent = "The server does not answer: these figures stand still. Trying again."; delete main.dataset.following; }, 8000);
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 5000); // it was refused, and does not come back by itself
  });
}

// point shows the values of one point of the plots, in the legends of all of them; without one, those of all the time.
function point(section, at) {
  const row = at === null ? null : section.querySelectorAll(".values tbody tr")[at];
  for (const value of section.querySelectorAll("[data-column]")) value.textContent = row ? row.cells[value.dataset.column].textContent : value.dataset.all;
  const time = section.querySelector(".at");
  time.textContent = row ? row.cells[0].textContent : time.dataset.all;
  for (const area of section.querySelectorAll(".area")) {
    const rule = area.querySelector(".rule");
    rule.setAttribute("visibility", row ? "visible" : "hidden");
    for (const end of ["x1", "x2"]) rule.setAttribute(end, `${((at ?? 0) + .5) / area.dataset.points * 100}%`);
  }
  if (row) section.dataset.pointed = at; else delete section.dataset.pointed;
}

function plots() {
  const areaOf = (event) => event.target instanceof Element ? event.target.closest(".area") : null;
  const sections = () => document.querySelectorAll(".plots[data-pointed]");
  document.addEventListener("pointermove", (event) => {
    const area = areaOf(event);
    if (!area) { if (!document.activeElement?.matches(".area")) for (const s of sections()) point(s, null); return; }
    const box = area.getBoundingClientRect(), n = Number(area.dataset.points);
    point(area.closest(".plots"), Math.min(n - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * n))));
  });
  document.addEventListener("focusout", (event) => { if (areaOf(event)) for (const s of sections()) point(s, null); });
  document.addEventListener("keydown", (event) => {
    const area = areaOf(event);
    if (!area) return;
    const section = area.closest(".plots"), n = Number(area.dataset.points), now = section.dataset.pointed === undefined ? n : Number(section.dataset.pointed);
    const to = { ArrowLeft: now - 1, ArrowRight: now === n ? 0 : now + 1, Home: 0, End: n - 1, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(section, to === null ? null : Math.min(n - 1, Math.max(0, to)));
  });
}

// keys are those for people who do not reach for the mouse. None of them works while somebody types.
function keys() {
  const dialog = document.getElementById("keys");
  const rows = () => [...document.querySelectorAll("main .rows tbody tr")];
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), textarea, select") || dialog.open) return;
    const all = rows(), here = all.findIndex((row) => row.classList.contains("here"));
    switch (event.key) {
      case "/": {
        const find = document.getElementById("find");
        if (find) find.focus(); else location.href = "./jobs#find";
        break;
      }
      case "j": case "k": {
        const to = all[Math.min(all.length - 1, Math.max(0, event.key === "j" ? here + 1 : here - 1))];
        if (!to) return;
        all[here]?.classList.remove("here");
        to.classList.add("here");
        to.querySelector("a")?.focus({ preventScroll: true });
        to.scrollIntoView({ block: "nearest" });
        break;
      }
      case "x": {
        const mark = all[here]?.querySelector("input[type=checkbox]");
        if (!mark) return;
        mark.click();
        break;
      }
      case "?": dialog.showModal(); break;
      default: return;
    }
    event.preventDefault();
  });
  const help = document.getElementById("help");
  help.hidden = false;
  help.addEventListener("click", () => dialog.showModal());
  dialog.querySelector("button").addEventListener("click", () => dialog.close());
}

function theme() {
  const button = document.getElementById("theme");
  const words = { "": ["◐", "Colours: as the system has them"], light: ["☀", "Colours: light"], dark: ["☾", "Colours: dark"] };
  const show = (now) => { colour(now); [button.textContent] = words[now] || words[""]; button.title = (words[now] || words[""])[1]; button.setAttribute("aria-label", button.title); };
  show(stored());
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(stored()) + 1) % themes.length];
    try { localStorage.setItem("onceq-theme", next); } catch { /* it lasts for this page */ }
    show(next);
  });
}

// marks counts what is marked, and lets nothing be sent while nothing is.
function marks() {
  for (const form of document.querySelectorAll("form.mark")) {
    const head = form.querySelector("thead th.mark, thead th");
    const boxes = [...form.querySelectorAll("input[name=ids]")], all = form.querySelector("input[name=all]"), said = form.querySelector(".marked");
    const every = document.createElement("input");
    every.type = "checkbox";
    every.setAttribute("aria-label", "Mark all jobs of this page");
    head.replaceChildren(every);
    const show = () => {
      const n = boxes.filter((box) => box.checked).length;
      for (const box of [...boxes, every]) box.disabled = all.checked;
      said.textContent = all.checked ? "The next page says how many these are." : n ? `${n} marked` : "Mark jobs to act on them.";
      for (const button of form.querySelectorAll("button[name=do]")) button.disabled = !all.checked && n === 0;
      every.checked = n > 0 && n === boxes.length;
    };
    every.addEventListener("change", () => { for (const box of boxes) box.checked = every.checked; show(); });
    form.addEventListener("change", show);
    show();
  }
}

document.addEventListener("DOMContentLoaded", () => {
  main = document.getElementById("main");
  status = document.getElementById("live");
  theme();
  plots();
  keys();
  marks();
  if (location.hash === "#find") document.getElementById("find")?.focus();
  if (main && main.dataset.live && window.EventSource) follow();
  if (main && main.dataset.every) setInterval(() => { if (!document.hidden) take(); }, 1000 * main.dataset.every);
});
window.addEventListener("pageshow", (event) => { if (event.persisted) for (const form of document.querySelectorAll("form.mark")) form.dispatchEvent(new Event("change")); });
