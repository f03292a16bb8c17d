// Addresses of the page: "#/rollouts?run=a&fate=filtered". All that a view shows is in its
// address, so that it can be kept, shared, and left by the back button.

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "crew", params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a view; the run is carried along. Empty filters are left out. */
export function link(view, params = {}) {
  const run = here().params.run;
  const all = Object.entries({ run, ...params }).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#/${view}${all.length ? `?${new URLSearchParams(all)}` : ""}`;
}

export function go(view, params = {}) {
  location.hash = link(view, params);
}

/** Change parts of this view's address. `quiet` makes no step for the back button. */
export function change(params, quiet = false) {
  const { view, params: now } = here();
  const hash = link(view, { ...now, ...params });
  if (!quiet) location.hash = hash;
  else {
    history.replaceState(null, "", hash);
    redraw();
  }
}

/** Draw the view again, as if somebody had come to this address. */
export function redraw() {
  window.dispatchEvent(new Event("hashchange"));
}
