import { el } from "./dom.js";
export async function discardedView() { return el('p', {}, 'discarded'); }
