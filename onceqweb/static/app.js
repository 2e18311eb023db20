// The page works without this script. With it, a page follows the database: the server sends an event when what the page
// shows has changed, and the page then reads itself again and takes over its regions.
"use strict";

const main = document.getElementById("main");
const status = document.getElementById("live");
let reading = false, again = false;

// busy says that a person is in the middle of something in a region, which is then left as it is.
function busy(region) {
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
        region.replaceChildren(...[...other.childNodes].map((node) => document.adoptNode(node)));
        if (at >= 0) region.querySelectorAll("a, button, input")[at]?.focus({ preventScroll: true });
      }
      const nav = fresh.querySelector("header nav"), old = document.querySelector("header nav");
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

if (main && main.dataset.live && window.EventSource) follow();
