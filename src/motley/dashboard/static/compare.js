import { el } from "./dom.js";
export async function compareView() { return el('p', {}, 'compare'); }
